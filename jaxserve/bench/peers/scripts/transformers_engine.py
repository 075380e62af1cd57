"""transformers on torch: the model's forward pass with its own cache, in a loop that takes the likeliest token."""

import os
import time

import accelerate  # noqa: F401  # pyright: ignore[reportMissingImports]
import gguf  # noqa: F401  # transformers needs these two to read the file, and only then says that they are missing
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from exchange import timing  # pyright: ignore[reportMissingImports]


class Engine:
    """The model in bfloat16, as the packages suggest for a CPU that multiplies it natively."""

    def __init__(self, model, num_threads, max_num_seqs, max_len, options):
        torch.set_num_threads(num_threads)
        folder, name = os.path.split(os.path.abspath(model))
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, gguf_file=name, dtype=torch.bfloat16).eval()
        self.facts = {
            "version": f"{transformers.__version__}, torch {torch.__version__}",
            "vocab_size": self._model.config.vocab_size,
            "weights": "bfloat16",
        }

    @torch.inference_mode()
    def generate(self, prompts, num_tokens):
        """See exchange. All prompts of a call have one length, so that nothing is padded."""
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        output = self._model(ids, use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True).tolist()
        first = time.perf_counter()
        for _ in range(num_tokens - 1):
            output = self._model(torch.tensor(tokens), past_key_values=output.past_key_values, use_cache=True)
            tokens = output.logits[:, -1].argmax(-1, keepdim=True).tolist()
        end = time.perf_counter()
        return timing(start, first, end, len(prompts), len(prompts) * num_tokens)
