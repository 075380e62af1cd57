"""OpenVINO GenAI's continuous batching, stepped from here so that the first tokens are seen. It reads GGUF itself."""

import time

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai  # pyright: ignore[reportMissingImports]
from exchange import timing  # pyright: ignore[reportMissingImports]

MAX_BATCH_TOKENS = 2048  # a prompt is one step, as its own pipeline for single requests has it


class Engine:
    """One pipeline with room for every sequence, its prefix cache off."""

    def __init__(self, model, num_threads, max_num_seqs, max_len, options):
        schedule = openvino_genai.SchedulerConfig()
        schedule.max_num_seqs = max_num_seqs
        schedule.max_num_batched_tokens = MAX_BATCH_TOKENS
        schedule.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": num_threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, schedule, "CPU", properties)
        self._num_requests = 0
        vocab = self._pipeline.get_tokenizer().get_vocab()
        self.facts = {"version": openvino_genai.__version__, "vocab_size": len(vocab)}

    def generate(self, prompts, num_tokens):
        """See exchange."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        start = time.perf_counter()
        handles = [self._add(tokens, config) for tokens in inputs]
        counts = [0] * len(handles)
        while min(counts) == 0:
            self._step(handles, counts)
        first, num_at_first = time.perf_counter(), sum(counts)
        while self._pipeline.has_non_finished_requests():
            self._step(handles, counts)
        return timing(start, first, time.perf_counter(), num_at_first, sum(counts))

    def _add(self, tokens, config):
        self._num_requests += 1
        return self._pipeline.add_request(self._num_requests, tokens, config)

    def _step(self, handles, counts):
        """One step, and the tokens it gave counted."""
        self._pipeline.step()
        for row, handle in enumerate(handles):
            if handle.can_read():
                counts[row] += sum(len(output.generated_ids) for output in handle.read().values())
