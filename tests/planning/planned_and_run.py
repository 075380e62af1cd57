"""Run by test_compiled_plans.py in a process with four virtual devices; prints one JSON object.

`python planned_and_run.py run MODEL TENSORxEXPERTxDATA PROGRAM...`: what the engine's own arrays and programs show
when they run. `python planned_and_run.py planted`: doubts about programs made to have them.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxserve.engine.experts import first_placement, layers_with_experts, with_tables  # noqa: E402
from jaxserve.engine.loading import Recipe, load_model, model_config  # noqa: E402
from jaxserve.engine.progress import Silent  # noqa: E402
from jaxserve.engine.slot_state import empty_state  # noqa: E402
from jaxserve.engine.spread import spread_over  # noqa: E402
from jaxserve.engine.step import Program, step_function  # noqa: E402
from jaxserve.planning.doubts import alias_doubts, gathered_weight_doubts, temp_doubts  # noqa: E402
from jaxserve.planning.pages import page_plan  # noqa: E402
from jaxserve.planning.request import PlanRequest  # noqa: E402
from jaxserve.planning.step_programs import step_shapes_of  # noqa: E402
from jaxserve.step_inputs import buffer_views  # noqa: E402
from pallas_kernels.kernels import XLA  # noqa: E402
from sharding.hlo import collectives  # noqa: E402

SMALL: dict = {"topology": "cpu:4", "context": 64, "batch": 4, "num_tokens": 64}


def run(model: str, sizes: str, names: list[str]) -> dict:
    tensor, expert, data = map(int, sizes.split("x"))
    request = PlanRequest(model=model, tensor=tensor, expert=expert, data=data, **SMALL)
    over = spread_over(request.plan, model_config(Path(model)), jax.devices())
    loaded = load_model(Path(model), Recipe(layout="expanded", dtype="float32"), Silent(), over.placement)
    params, pages = loaded.params, page_plan(request, over.config)
    if layers_with_experts(over.config):
        params = with_tables(
            params, first_placement(over.config, request.plan), lambda table: jax.device_put(table, over.everywhere)
        )
    over = over.with_params(params)
    program = Program(model=loaded.model, config=over.config, kernels=XLA, dtype="float32", spread=over)
    program = program.for_context(request.context)
    num_pages = request.group_batch * pages.sequence_pages * request.data
    cache = program.new_cache(pages.spec, num_pages)
    state = jax.device_put(empty_state(program, request.group_batch, request.context), program.by_group)
    found: dict = {"weights_bytes": held(params), "kv_cache_bytes": held(cache)}
    for name, shape in zip(("prefill", "decode"), step_shapes_of(request, pages), strict=True):
        if name not in names:
            continue
        buffer = jax.device_put(np.tile(buffer_views(shape)[0], request.data), program.by_group)
        compiled = step_function(program, shape).lower(params, cache, state, buffer).compile()
        memory = compiled.memory_analysis()
        outputs, cache, state = compiled(params, cache, state, buffer)
        assert np.asarray(outputs.token_ids).shape == (shape.num_rows * request.data,)
        found[name] = {
            "argument_bytes": memory.argument_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "held_bytes": held((params, cache, state, buffer)),
        }
    return found


def held(tree: object) -> int:
    """Bytes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def planted() -> dict:
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("tensor",))
    cut, whole = NamedSharding(mesh, P("tensor", None)), NamedSharding(mesh, P())
    weight = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=cut)
    x = jax.ShapeDtypeStruct((4, 32), jnp.float32, sharding=whole)

    def gathers(x, weight):
        return x @ jax.lax.with_sharding_constraint(weight, whole).T * 2.0

    def sums(x, weight):
        return (x @ weight.T).sum()

    def sent(function):
        text = jax.jit(function).lower(x, weight).compile().as_text()
        assert text is not None
        return [vars(each) for each in collectives(text, 2)]

    cache = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def memory(function, argument, **options):
        found = jax.jit(function, **options).lower(argument).compile().memory_analysis()
        assert found is not None
        return found

    def step(cache):
        return cache.at[3].set(1.0)

    def sort(a):
        return jnp.sort(a @ a.T, axis=0)[0]

    temp = memory(sort, jax.ShapeDtypeStruct((256, 8), jnp.float32)).temp_size_in_bytes
    shapes = {"layers.mlp.up": [(64, 32)]}
    return {
        "gathered": gathered_weight_doubts("decode", sent(gathers), shapes),
        "not_gathered": gathered_weight_doubts("decode", sent(sums), shapes),
        "not_donated": alias_doubts("decode", memory(step, cache).alias_size_in_bytes, 4096),
        "donated": alias_doubts("decode", memory(step, cache, donate_argnums=0).alias_size_in_bytes, 4096),
        "large_temp": temp_doubts("decode", temp, 8192, {"layers.mlp.up": 10**9}),
        "small_temp": temp_doubts("decode", temp, 10**9, {"layers.mlp.up": 10**9}),
    }


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    model, sizes, *names = arguments or ("", "")
    print(json.dumps(planted() if command == "planted" else run(model, sizes, names)))
