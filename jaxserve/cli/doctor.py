"""`jaxserve doctor`: whether this installation and this machine can do what jaxserve needs."""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jaxserve.cli.options import engine_options, takes
from jaxserve.cli.terminal import print_json, visible_line
from jaxserve.config import EngineConfig

CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve")
TRIAL_TOKENS = 4
TRIAL_MODEL_LEN = 256


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found. skip: it could not be made, which is no failure."""

    name: str
    status: Literal["ok", "skip", "fail"]
    detail: str


Check = Callable[[EngineConfig], Iterator[Finding]]


@takes(config=engine_options())
def doctor(config: EngineConfig, json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check versions, devices, caches, kernels, and a few tokens of the model if it was pulled."""
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not json_:
            print(f"{finding.status:<5} {finding.name:<22} {visible_line(finding.detail)}", flush=True)
    failed = [finding.name for finding in findings if finding.status == "fail"]
    if json_:
        print_json({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]})
    elif failed:
        print(f"failed: {', '.join(failed)}")
    raise typer.Exit(1 if failed else 0)


def examine(config: EngineConfig, checks: Sequence[Check] | None = None) -> Iterator[Finding]:
    """Runs the checks one after the other; one that breaks is a failure and the next goes on."""
    for check in CHECKS if checks is None else checks:
        try:
            yield from check(config)
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name=name, status="fail", detail=f"{type(error).__name__}: {error}")


def check_python(config: EngineConfig) -> Iterator[Finding]:
    """The interpreter against the range in our metadata."""
    wanted = _metadata_field("Requires-Python")
    yield _version_finding("python", platform.python_version(), wanted)


def check_packages(config: EngineConfig) -> Iterator[Finding]:
    """Every package we need against the range in our metadata."""
    for line in importlib.metadata.requires("jaxserve") or ():
        name, wanted, marker = split_requirement(line)
        if "extra" in marker:
            continue
        try:
            yield _version_finding(name, importlib.metadata.version(name), wanted)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name=name, status="fail", detail=f"not installed; needed: {wanted or 'any version'}")


def _metadata_field(field: str) -> str:
    return importlib.metadata.metadata("jaxserve")[field] or ""


def _version_finding(name: str, version: str, wanted: str) -> Finding:
    fits = version_fits(version, wanted)
    detail = f"{version} (supported: {wanted or 'any'})"
    return Finding(name=name, status="ok" if fits else "fail", detail=detail)


def split_requirement(line: str) -> tuple[str, str, str]:
    """`jax<0.13,>=0.11.2; extra == "x"` -> name, range, marker."""
    requirement, _, marker = line.partition(";")
    found = re.match(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*(.*?)\s*$", requirement)
    assert found, f"metadata holds a requirement that is none: {line!r}"
    return found[1], found[2].strip("()"), marker.strip()


def version_fits(version: str, wanted: str) -> bool:
    """Whether the numbers of a version lie in a range of >= and < bounds, the only ones we write."""
    for bound in filter(None, (part.strip() for part in wanted.split(","))):
        found = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
        assert found, f"metadata holds a bound of another kind: {bound!r}"
        is_at_least = _release(version) >= _release(found[2])
        if is_at_least != (found[1] == ">="):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    while parts and parts[-1] == 0:  # 0.13 and 0.13.0 are the same
        parts.pop()
    return tuple(parts)


def check_devices(config: EngineConfig) -> Iterator[Finding]:
    """What jax finds; the first one is used."""
    import jax

    from jaxserve.engine.threads import settle_threads

    settle_threads(config.threads)  # the engine will want it, and what follows starts jax
    for device in jax.devices():
        stats = device.memory_stats() if device.platform != "cpu" else None
        memory = f", {stats['bytes_limit']:,} bytes" if stats and "bytes_limit" in stats else ""
        yield Finding(
            name=f"device {device.id}", status="ok", detail=f"{device.platform} ({device.device_kind}){memory}"
        )


def check_cpu(config: EngineConfig) -> Iterator[Finding]:
    """Model, cores and vector extensions of the host."""
    name, features = cpu_facts(Path("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        name="cpu", status="ok", detail=f"{name}, {cores} cores usable, features: {' '.join(features) or '-'}"
    )


def cpu_facts(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """Model name and those of CPU_FEATURES that it has, from Linux's description; else the machine type."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    fields = dict(re.findall(r"^([\w ]+?)\s*:[ \t]*(.*)$", text, flags=re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return fields.get("model name") or platform.machine(), tuple(f for f in CPU_FEATURES if f in flags)


def check_caches(config: EngineConfig) -> Iterator[Finding]:
    """Whether models and compiled programs can be kept, and what they take."""
    for name, folder in (("model cache", config.cache_dir), ("compilation cache", config.compilation_cache_dir)):
        assert folder is not None, "the command line sets both"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
        except OSError as error:
            yield Finding(name=name, status="fail", detail=f"{folder} cannot be written: {error.strerror}")
            continue
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
        yield Finding(name=name, status="ok", detail=f"{folder}, {len(sizes):,} files, {sum(sizes):,} bytes")


def check_kernels(config: EngineConfig) -> Iterator[Finding]:
    """The kernels of XLA's operations or the reference's, against their definitions."""
    import jax

    from jaxserve.cli import self_test
    from jaxserve.engine.build import use_compilation_cache
    from pallas_kernels.kernels import kernels_for

    use_compilation_cache(config.compilation_cache_dir)
    name = "xla" if config.kernels == "cpu" else config.kernels
    kernels, _ = kernels_for(name, jax.devices()[0].platform)
    for name, error in self_test.attention_errors(kernels).items():
        yield _error_finding(f"attention {name}", kernels.name, error, self_test.ATTENTION_TOLERANCE)
    for name, error in self_test.matmul_errors(kernels).items():
        yield _error_finding(f"matmul {name}", kernels.name, error, self_test.MATMUL_TOLERANCE)


def check_cpu_kernels(config: EngineConfig) -> Iterator[Finding]:
    """The compiled kernels that the default model needs on a CPU: found or built, and tested."""
    import jax

    from jaxserve.engine.cpu_choice import CpuKernelsUnavailable, KernelNeeds, available_cpu_kernels, origins_line
    from jaxserve.engine.progress import Silent
    from jaxserve.kv_cache import KVCacheSpec

    if jax.devices()[0].platform != "cpu" or config.kernels not in ("auto", "cpu"):
        return
    cache = KVCacheSpec(num_layers=1, num_kv_heads=1, head_size=64, page_size=config.page_size, dtype="float32")
    needs = KernelNeeds(formats=frozenset(("Q4_1", "Q8_0")), cache=cache)
    level = None if config.cpu_level == "auto" else config.cpu_level
    try:
        targets = available_cpu_kernels(needs, config.compilation_cache_dir, level, Silent())
    except (CpuKernelsUnavailable, ValueError) as lack:
        yield Finding(name="cpu kernels", status="fail", detail=str(lack))
        return
    detail = f"{targets.level}: {', '.join(sorted(needs.formats))} and attention pass ({origins_line(targets)})"
    yield Finding(name="cpu kernels", status="ok", detail=detail)


def _error_finding(name: str, kernels: str, error: float, tolerance: float) -> Finding:
    status = "ok" if error <= tolerance else "fail"  # NaN fails
    return Finding(name=name, status=status, detail=f"{kernels}: largest error {error:.1e}, tolerance {tolerance:.0e}")


def check_model(config: EngineConfig) -> Iterator[Finding]:
    """A few greedy tokens from the model, if it is on this disk."""
    from checkpoints.errors import DownloadError
    from checkpoints.hub import pull

    assert config.cache_dir is not None, "the command line sets it"
    try:
        pulled = pull(
            config.model, cache_dir=config.cache_dir, progress=False, fetch_wheel=_refuse, fetch_repository=_refuse
        )
    except DownloadError:
        yield Finding(name="model", status="skip", detail=f"{config.model} is not here: jaxserve pull {config.model}")
        return
    digest = f", sha256 {pulled.sha256}" if pulled.sha256 else ""
    yield Finding(name="model file", status="ok", detail=f"{pulled.path}, {pulled.num_bytes:,} bytes{digest}")
    yield _trial(config)


def _refuse(*arguments: Any) -> Path:
    from checkpoints.errors import DownloadError

    raise DownloadError("doctor fetches nothing")


def _trial(config: EngineConfig) -> Finding:
    from jaxserve import offline
    from jaxserve.engine.progress import Silent
    from jaxserve.sampling_params import SamplingParams

    small = dataclasses.replace(
        config, max_model_len=config.max_model_len or TRIAL_MODEL_LEN, max_num_seqs=config.max_num_seqs or 1
    )
    frontend = offline.start_frontend(small, Silent(), warm_up=False)
    with contextlib.closing(frontend):
        ids = [0] if frontend.tokenizer is None else frontend.encode_prompt("The capital of France is")
        params = SamplingParams(temperature=0.0, max_tokens=TRIAL_TOKENS, ignore_eos=True)
        deltas = list(frontend.submit(ids, params))
    text = "".join(delta.text for delta in deltas)
    count = sum(len(delta.token_ids) for delta in deltas)
    reason = deltas[-1].finish_reason
    status = "ok" if reason == "length" and count == TRIAL_TOKENS else "fail"
    return Finding(name="model step", status=status, detail=f"{count} tokens, finish_reason {reason}, text {text!r}")


CHECKS: tuple[Check, ...] = (
    check_python,
    check_packages,
    check_devices,
    check_cpu,
    check_caches,
    check_kernels,
    check_cpu_kernels,
    check_model,
)
