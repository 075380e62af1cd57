"""llama.cpp through llama-cpp-python's low-level interface: batches of sequences, greedy, no sampler of its own."""

import ctypes
import time

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
from exchange import timing  # pyright: ignore[reportMissingImports]

MAX_BATCH_TOKENS = 2048


@llama_cpp.llama_log_callback
def _no_log(level, text, user_data):
    """llama.cpp reports much while it loads."""


class Engine:
    """One model and one context per number of sequences, all kept."""

    def __init__(self, model, num_threads, max_num_seqs, max_len, options):
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_no_log, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._num_threads = num_threads
        self._contexts = {}
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.facts = {"version": llama_cpp.__version__, "vocab_size": self._vocab_size}

    def generate(self, prompts, num_tokens):
        """See exchange. The prompts are computed in as few batches as hold them."""
        context = self._context(len(prompts), max(map(len, prompts)) + num_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        tokens = self._prefill(context, prompts)
        first = time.perf_counter()
        lengths = [len(prompt) for prompt in prompts]
        for step in range(num_tokens - 1):
            rows = [(token, lengths[s] + step, s, True) for s, token in enumerate(tokens)]
            self._decode(context, rows)
            tokens = [self._likeliest(context, s) for s in range(len(prompts))]
        end = time.perf_counter()
        return timing(start, first, end, len(prompts), len(prompts) * num_tokens)

    def _prefill(self, context, prompts):
        rows = [
            (token, position, s, position == len(prompt) - 1)
            for s, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens = {}
        for begin in range(0, len(rows), MAX_BATCH_TOKENS):
            some = rows[begin : begin + MAX_BATCH_TOKENS]
            self._decode(context, some)
            tokens |= {row[2]: self._likeliest(context, i) for i, row in enumerate(some) if row[3]}
        return [tokens[s] for s in range(len(prompts))]

    def _context(self, num_seqs, num_tokens):
        """A context for so many sequences of so many tokens, kept; made when first asked for one of that size."""
        held, context = self._contexts.get(num_seqs, (0, None))
        if held < num_tokens:
            if context:
                llama_cpp.llama_free(context)
            context = self._new_context(num_seqs, num_tokens)
            self._contexts[num_seqs] = num_tokens, context
        return context

    def _new_context(self, num_seqs, num_tokens):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_seqs * num_tokens
        params.n_batch = MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._num_threads
        params.n_seq_max = num_seqs
        if hasattr(params, "kv_unified"):
            params.kv_unified = True  # as fast as a part for each sequence, within noise, and takes less memory
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context for {num_seqs} sequences of {num_tokens} tokens")
        return context

    def _decode(self, context, rows):
        """rows: (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wants_logits
        code = llama_cpp.llama_decode(context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(rows)} tokens")

    def _likeliest(self, context, row):
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())
