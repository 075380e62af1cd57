"""Which tensor of a file is which parameter of ours, as tables; and the check that every tensor is accounted for.

Knows no model: a family writes its own table and says which tensors may be tied or are left out on purpose.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike

from checkpoints.errors import CheckpointError
from checkpoints.tensors import TensorInfo

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_MAX_LISTED = 50


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Rules from our parameter path to the file's tensor name; both sides may hold placeholders such as `{layer}`.

    NAMES = NameMap(rules={"layers.{layer}.attention.q": "blk.{layer}.attn_q.weight"})
    NAMES.tensor_name("layers.3.attention.q")  # "blk.3.attn_q.weight"

    A placeholder that only the file's side has stands for several tensors that are one parameter: experts.
    """

    rules: Mapping[str, str]

    def tensor_name(self, parameter: str) -> str:
        """The file's name for one of our parameters, a placeholder of the file's side alone left in it.

        KeyError where no rule matches: the family's table is wrong.
        """
        return _translate(parameter, self.rules.items())

    def tensor_names(self, parameter: str, count: int) -> list[str]:
        """The file's names for one of our parameters: one, or `count` where it is kept as several tensors."""
        name = self.tensor_name(parameter)
        return [_PLACEHOLDER.sub(str(n), name) for n in range(count)] if _PLACEHOLDER.search(name) else [name]

    def parameter(self, tensor_name: str) -> str:
        """Our path for one of the file's tensors; KeyError where no rule matches."""
        return _translate(tensor_name, ((theirs, ours) for ours, theirs in self.rules.items()))

    def expand(self, **counts: int) -> dict[str, str]:
        """Every parameter path -> tensor name, placeholders filled: `expand(layer=30)` gives layers 0 to 29."""
        return {
            ours: theirs
            for ours_rule, theirs_rule in self.rules.items()
            for ours, theirs in _fill(ours_rule, theirs_rule, counts)
        }


def check_accounting(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, TensorInfo],
    *,
    tied: Collection[str] = (),
    declared_absent: Collection[str] = (),
    source: str | PathLike[str],
) -> None:
    """Nothing, if every tensor is accounted for; else one CheckpointError that lists all that are not.

    `expected` is tensor name -> row-major shape. A `tied` tensor takes its values from another one: it may be missing,
    and a copy of it in the file is fine. A `declared_absent` tensor is one the family leaves out on purpose: the file
    may hold it. Both may use placeholders (`"blk.{layer}.attn_rot_embd"`).
    """
    exempt = [_pattern(name) for name in (*tied, *declared_absent)]

    def is_exempt(name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in exempt)

    missing = sorted(name for name in expected if name not in found and not is_exempt(name))
    unexpected = sorted(name for name in found if name not in expected and not is_exempt(name))
    wrong = sorted(name for name in expected if name in found and found[name].shape != tuple(expected[name]))
    if not (missing or unexpected or wrong):
        return
    shapes = [f"{name} is {list(found[name].shape)}, not {list(expected[name])}" for name in wrong]
    parts = [
        f"{len(lines)} {label}: {_listed(lines)}"
        for label, lines in (("missing", missing), ("unexpected", unexpected), ("wrongly shaped", shapes))
        if lines
    ]
    raise CheckpointError(f"{source}: the tensors are not those of the model: " + "; ".join(parts))


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
    return ", ".join(lines[:_MAX_LISTED]) + more


def _pattern(rule: str) -> re.Pattern[str]:
    """A regular expression in which each placeholder stands for one number."""
    parts = _PLACEHOLDER.split(rule)
    literal = [re.escape(part) if index % 2 == 0 else rf"(?P<{part}>\d+)" for index, part in enumerate(parts)]
    return re.compile("".join(literal))


def _translate(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for source, target in rules:
        if match := _pattern(source).fullmatch(name):
            return _filled(target, match.groupdict())
    raise KeyError(f"no rule of the name map matches {name!r}")


def _filled(rule: str, numbers: Mapping[str, str]) -> str:
    """The rule with its placeholders replaced, those without a number left in it."""
    return _PLACEHOLDER.sub(lambda sign: numbers.get(sign[1], sign[0]), rule)


def _fill(ours: str, theirs: str, counts: Mapping[str, int]) -> list[tuple[str, str]]:
    for placeholder in _PLACEHOLDER.findall(ours)[:1]:
        sign = f"{{{placeholder}}}"
        return [
            pair
            for index in range(counts[placeholder])
            for pair in _fill(ours.replace(sign, str(index)), theirs.replace(sign, str(index)), counts)
        ]
    return [(ours, theirs)]
