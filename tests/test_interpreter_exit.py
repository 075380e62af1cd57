"""A script that forgets to close its LLM still ends, quietly, even while a request runs."""

import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).parent / "fixtures" / "models" / "llama_untied"
SCRIPT = """
import sys
from jaxserve import LLM, SamplingParams
llm = LLM(sys.argv[1], max_num_seqs=2, max_num_batched_tokens=64, num_pages=64)
print(len(llm.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids))
llm.frontend.submit([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
"""


def test_an_unclosed_llm_does_not_keep_the_program_alive():
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(MODEL)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "5"), ran.stderr
    assert ran.stderr == ""
