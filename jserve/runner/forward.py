"""The forward programs of one step shape, in the form that suits the platform.

TPU and GPU run a step as one program.  XLA's CPU compiler would copy every layer's weights out of their stack in each
step, which doubles the time of small steps; so on CPU a layer is a program of its own, one for each layer group, called
once for each layer with arrays of that layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jserve.models.config import ModelConfig
from jserve.models.inputs import AttentionPlan, ForwardInputs
from jserve.parallel.placement import POOL, WHOLE, Placement
from jserve.runner.batch import InputLayout, fed_token_ids


@dataclass(frozen=True)
class ServedParams:
    """Parameters as the programs take them.

    Attributes:
      outer: the model's tree with `layers` None.
      layers: the layers' tree, stacked on axis 0; or a tuple of trees, one a layer.
    """

    outer: Any
    layers: Any

    @property
    def by_layer(self) -> bool:
        return isinstance(self.layers, tuple)

    def shapes(self) -> ServedParams:
        as_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return ServedParams(jax.tree.map(as_shape, self.outer), jax.tree.map(as_shape, self.layers))


def serve_params(params: Any, by_layer: bool) -> ServedParams:
    """Splits a model's tree.  `by_layer` makes an array for each layer, on CPU without a copy (rows of a host array
    are arrays by themselves where they are aligned)."""
    outer, layers = params.replace(layers=None), params.layers
    if by_layer:
        num_layers = jax.tree.leaves(layers)[0].shape[0]
        # Host arrays of the parts, read once for all layers.
        parts = jax.tree.map(lambda stack: [(part.device, np.asarray(part.data)) for part in stack.addressable_shards], layers)
        layers = tuple(
            jax.tree.map(lambda stack, its_parts: _layer_of(stack, its_parts, index), layers, parts)
            for index in range(num_layers)
        )
    return ServedParams(outer, layers)


def served_shapes(params: Any, by_layer: bool) -> ServedParams:
    """As `serve_params`, of a tree of shapes."""
    outer, layers = params.replace(layers=None), params.layers
    if by_layer:
        num_layers = jax.tree.leaves(layers)[0].shape[0]
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=_of_layer(x.sharding)), layers)
        layers = (one,) * num_layers
    return ServedParams(outer, layers)


def _layer_of(stack: jax.Array, parts: list[tuple[jax.Device, np.ndarray]], index: int) -> jax.Array:
    if not isinstance(stack.sharding, NamedSharding):
        return jax.device_put(parts[0][1][index])
    arrays = [jax.device_put(part[index], device) for device, part in parts]
    return jax.make_array_from_single_device_arrays(stack.shape[1:], _of_layer(stack.sharding), arrays)


def _of_layer(sharding: Sharding) -> Sharding:
    """How one layer lies, whose stack of all layers lies so."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


class ForwardPrograms:
    """Lowers and calls the forward pass of a step shape.

    Args:
      model: module of the model family (begin, layer, finish, forward).
      config: of the shard that one device runs, as the layouts in `attention` are.
    """

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        layout: InputLayout,
        attention: AttentionPlan,
        by_layer: bool,
        placement: Placement,
    ):
        self._model = model
        self._config = config
        self._layout = layout
        self._attention = attention
        self._by_layer = by_layer
        self._placement = placement
        groups = config.group_of_layers
        self._groups = groups
        self._places = [np.int32(groups[:layer].count(group)) for layer, group in enumerate(groups)]

    def jobs(self, params: ServedParams, pools: tuple, slot_tokens: jax.ShapeDtypeStruct, packed: Any) -> dict:
        """name of each program -> function that lowers it; the arguments may be shapes."""
        placement = self._placement
        if not self._by_layer:
            arguments = params.outer, params.layers, pools, slot_tokens, packed
            return {"forward": placement.lowering(self._whole, arguments, (WHOLE, WHOLE, POOL), donated=(2,))}
        first = params.outer, slot_tokens, packed
        hidden, sample_tokens, contexts = placement.shapes_whole(
            jax.eval_shape(placement.split(self._begin, first, WHOLE), *first)
        )
        weights, place = params.layers[0], placement.shape((), jnp.int32)
        layers = {}
        for group, (pool, context) in enumerate(zip(pools, contexts)):
            arguments = weights, place, hidden, pool, context
            program = functools.partial(self._layer, group)
            layers[_layer_name(group)] = placement.lowering(program, arguments, (WHOLE, POOL), (2, 3))
        return {
            "begin": placement.lowering(self._begin, first),
            **layers,
            "finish": placement.lowering(self._finish, (params.outer, hidden, sample_tokens), donated=(1,)),
        }

    def __call__(self, compiled: dict, params: ServedParams, pools: tuple, slot_tokens: jax.Array, packed: np.ndarray):
        """Returns hidden [T, D], sample_hidden [num_slots, D] and the pools, which were donated."""
        if not self._by_layer:
            return compiled["forward"](params.outer, params.layers, pools, slot_tokens, packed)
        hidden, sample_tokens, contexts = compiled["begin"](params.outer, slot_tokens, packed)
        layers, pools = [compiled[_layer_name(group)] for group in range(len(pools))], list(pools)
        for group, place, weights in zip(self._groups, self._places, params.layers):
            hidden, pools[group] = layers[group](weights, place, hidden, pools[group], contexts[group])
        hidden, sample_hidden = compiled["finish"](params.outer, hidden, sample_tokens)
        return hidden, sample_hidden, tuple(pools)

    def _whole(self, outer, layers, pools, slot_tokens, packed):
        inputs, model_inputs = self._inputs(slot_tokens, packed)
        params = outer.replace(layers=layers)
        hidden_TD, pools = self._model.forward(params, self._config, pools, model_inputs, self._attention)
        return hidden_TD, hidden_TD[inputs.sample_tokens], pools

    def _begin(self, outer, slot_tokens, packed):
        inputs, model_inputs = self._inputs(slot_tokens, packed)
        hidden_TD, contexts = self._model.begin(outer, self._config, model_inputs, self._attention)
        return hidden_TD, inputs.sample_tokens, contexts

    def _layer(self, group, weights, place, hidden_TD, pool, context):
        return self._model.layer(weights, self._config, group, place, hidden_TD, pool, context, self._attention)

    def _finish(self, outer, hidden_TD, sample_tokens):
        hidden_TD = self._model.finish(outer, self._config, hidden_TD)
        return hidden_TD, hidden_TD[sample_tokens]

    def _inputs(self, slot_tokens, packed):
        inputs = self._layout.unpack(packed)
        return inputs, ForwardInputs(fed_token_ids(inputs, slot_tokens), inputs.positions, inputs.batches())


def _layer_name(group: int) -> str:
    return f"layer of group {group}"
