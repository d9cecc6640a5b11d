"""The parts of a transformer computed by the C kernels: activations in float32, weights as the checkpoint has them or
in eight bits.

Each part keeps the tensors that its pointers point into. Letters as in `model.linear`, `attention` and `moe`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from model.attention import HeadNorms
from model.config import ModelConfig
from model.kernels.library import Build, load, load_fastest, load_fastest_rounding
from model.kv_cache import PagedKVCache
from model.moe import Expert
from model.step_input import StepInput

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
MAX_HEAD_DIM = 256
MAX_GROUP = 48
TOKENS_AT_ONCE = 512  # through the feed-forward net: bounds its scratch memory
ROWS_AT_ONCE = 1024  # to eight bits: bounds what that takes for a moment
SCALE_BYTES = 4  # of a row in eight bits, a float
GROUP, STEP = 16, 32  # what packed tokens and their inputs are rounded up to

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
SIGNATURES = {
    "linear": (_P, _L, _L, _I, _I, _P, _P, _P, _P, _P, _I, _I),
    "rms_norm": (_P, _P, _F, _L, _L, _P, _I),
    "feed_forward": (_P, _L, _L, _L, _I, _P, _P, _P, _P, _P, _I),
    "mixture": (_P, _L, _L, _L, _L, _L, _I, _P, _P, _P, _P, _P, _P, _P, _I),
    "store": (_P, _L, _L, _L, _L, _L, _P, _P, _P, _P, _F, _P, _I, _P, _P, _I),
    "likeliest": (_P, _L, _L, _L, _P, _P),
    "block_sums": (_P, _L, _L, _L, _L, _L, _P, _P, _L, _P),
    "pack_blocks": (_P, _I, _L, _L, _P, _L, _L, _I, _F, _F, _P, _L),
    "unpack_blocks": (_P, _L, _I, _L, _L, _P, _I, _P, _L),
    "attention": (_P, _L, _L, _L, _L, _I, _P, _L, _P, _P, _P, _L, _P, _P, _P, _I),
}


def library(build: Build | None = None, *, may_round: bool = False) -> tuple[Build, ctypes.CDLL]:
    """The kernels of one build, else of the fastest that can run here; KernelsUnavailable if there are none.

    `may_round`: activations to bfloat16, where the weights are.
    """
    if build is not None:
        kernels = load(build)
    else:
        build, kernels = load_fastest_rounding() if may_round else load_fastest()
    for name, arguments in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, None
    return build, kernels


def eight_bit_bytes(num_rows: int, num_inputs: int) -> int:
    """Memory that `eight_bit_rows` takes."""
    return num_rows * (_rounded(num_inputs, 4) + SCALE_BYTES)


def eight_bit_rows(weight: Tensor) -> Tensor:
    """A matrix [N, K] as the kernels read it in eight bits, int8 [N, K rounded up to 4, and 4 more]: each row's largest
    value becomes 127, and what that stands for is a float behind the row."""
    num_rows, num_inputs = weight.shape
    room = _rounded(num_inputs, 4)
    rows = torch.zeros((num_rows, room + SCALE_BYTES), dtype=torch.int8)
    for row, values in zip(rows.split(ROWS_AT_ONCE), weight.split(ROWS_AT_ONCE), strict=True):
        wide = values.float()
        scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        row[:, :num_inputs] = (wide / scales).round()
        row[:, room:] = scales.view(torch.int8)
    return rows


def _room(num_rows: int, *num_inputs: int) -> int:
    """Floats that so many rows take at most once they are packed."""
    return _rounded(num_rows, GROUP) * sum(_rounded(size, STEP) for size in num_inputs)


def _rounded(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (_P * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def _common_type(tensors: Sequence[Tensor]) -> int:
    """The kernels' number of the dtype that all have. ValueError if they differ."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise ValueError(f"the kernels take matrices of one dtype, not of {', '.join(sorted(map(str, types)))}")
    return TYPES[types.pop()]


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


class KernelLinear:
    def __init__(self, kernels: ctypes.CDLL, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._call = kernels.linear
        self._kept = [weight.contiguous() for weight in weights], [_floats(bias) for bias in biases]
        sizes = [weight.shape[0] for weight in weights]
        self._weights, self._biases = (_pointers(tensors) for tensors in self._kept)
        self._sizes = (_L * len(sizes))(*sizes)
        self._num_outputs = sum(sizes)
        self._type = _common_type(weights)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        num_tokens, num_inputs = x.shape
        y = x.new_empty(num_tokens, self._num_outputs) if add_to is None else add_to
        parts = len(self._sizes), self._weights, self._biases, self._sizes
        work = x.new_empty(_room(num_tokens, num_inputs))
        end = work.data_ptr(), y.data_ptr(), add_to is not None, torch.get_num_threads()
        self._call(x.data_ptr(), num_tokens, num_inputs, self._type, *parts, *end)
        return y


class KernelNorm:
    def __init__(self, kernels: ctypes.CDLL, weight: Tensor, eps: float) -> None:
        self._call = kernels.rms_norm
        self._weight = weight.float().contiguous()
        self._weight_pointer = self._weight.data_ptr()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        sizes = x.shape
        self._call(x.data_ptr(), self._weight_pointer, self._eps, *sizes, y.data_ptr(), torch.get_num_threads())
        return y


class KernelFeedForward:
    def __init__(self, kernels: ctypes.CDLL, expert: Expert) -> None:
        self._call = kernels.feed_forward
        self._kept = [matrix.contiguous() for matrix in (expert.gate, expert.up, expert.down)]
        self._matrices = [matrix.data_ptr() for matrix in self._kept]
        self._sizes = expert.down.shape[0], expert.gate.shape[0], _common_type(self._kept)  # K, I

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor | None:
        num_inputs, num_inner, _ = self._sizes
        work = x.new_empty(_room(min(len(x), TOKENS_AT_ONCE), num_inputs, num_inner, num_inner))
        for piece, target in zip(x.split(TOKENS_AT_ONCE), add_to.split(TOKENS_AT_ONCE), strict=True):
            end = work.data_ptr(), target.data_ptr(), torch.get_num_threads()
            self._call(piece.data_ptr(), len(piece), *self._sizes, *self._matrices, *end)
        return None


class KernelMoE:
    def __init__(
        self, kernels: ctypes.CDLL, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int
    ) -> None:
        self._call = kernels.mixture
        self._router = router.contiguous()
        self._kept = [[getattr(expert, name).contiguous() for expert in experts] for name in ("gate", "up", "down")]
        type_of_all = _common_type([self._router, *(matrix for matrices in self._kept for matrix in matrices)])
        self._matrices = self._router.data_ptr(), *(_pointers(tensors) for tensors in self._kept)
        num_inner, num_inputs = experts[0].gate.shape
        self._sizes = num_inputs, num_inner, len(experts), num_experts_per_token, type_of_all

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor | None:
        num_inputs, num_inner, num_experts, per_token, _ = self._sizes
        num_tokens = min(len(x), TOKENS_AT_ONCE)
        num_pairs = num_tokens * per_token
        num_rows = num_pairs + min(num_pairs, num_experts) * (GROUP - 1)
        room = _room(num_rows, num_inputs, num_inner, num_inner)
        work = x.new_empty(num_pairs * (num_inputs + 4) + num_tokens * num_experts + 16 + room)
        pieces = tuple(zip(x.split(TOKENS_AT_ONCE), add_to.split(TOKENS_AT_ONCE), strict=True))
        load = torch.empty((len(pieces), num_experts), dtype=torch.int64)
        for (piece, target), counts in zip(pieces, load, strict=True):
            end = work.data_ptr(), counts.data_ptr(), target.data_ptr(), torch.get_num_threads()
            self._call(piece.data_ptr(), len(piece), *self._sizes, *self._matrices, *end)
        return load.sum(dim=0)


class KernelLikeliest:
    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._call = kernels.likeliest

    def __call__(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        num_rows, num_columns = scores.shape
        count = min(count, num_columns)
        columns = torch.empty((num_rows, count), dtype=torch.int64)
        logprobs = torch.empty((num_rows, count))
        scores = scores.contiguous()
        self._call(scores.data_ptr(), num_rows, num_columns, count, columns.data_ptr(), logprobs.data_ptr())
        return columns, logprobs


class KernelAttention:
    """Reads the paged cache in place; one online softmax for decode and prefill alike."""

    def __init__(
        self, kernels: ctypes.CDLL, config: ModelConfig, cache: PagedKVCache, head_norms: Sequence[HeadNorms | None]
    ) -> None:
        self._store, self._attend = kernels.store, kernels.attention
        self._norms = [
            (None, None) if norms is None else (_floats(norms.query), _floats(norms.key)) for norms in head_norms
        ]
        self._eps = config.norm_eps
        self._shape = config.num_heads, config.num_kv_heads, config.head_dim, cache.layout.block_size
        self._type = TYPES[cache.memory.dtype]
        self._layers = [layer.data_ptr() for layer in cache.memory]
        self._cache = cache

    def store(self, layer: int, qkv: Tensor, step: StepInput) -> Tensor:
        num_heads, num_kv_heads, head_dim, block_size = self._shape
        num_queries = qkv.shape[1] // head_dim - 2 * num_kv_heads
        if qkv.shape[1] % head_dim or num_queries not in (0, num_heads):  # the kernels would read what is behind it
            raise ValueError(f"{qkv.shape[1]} numbers a token are no queries, keys and values of {self._shape[:3]}")
        queries = qkv.new_empty(step.num_tokens, num_queries, head_dim)
        angles = step.cosines.data_ptr(), step.sines.data_ptr()
        norms = (None if weight is None else weight.data_ptr() for weight in self._norms[layer])
        cache = step.slots.data_ptr(), self._type, self._layers[layer]
        end = queries.data_ptr(), torch.get_num_threads()
        heads = num_queries, num_kv_heads, head_dim, block_size
        self._store(qkv.data_ptr(), step.num_tokens, *heads, *angles, *norms, self._eps, *cache, *end)
        return queries

    def attend(self, layer: int, queries: Tensor, step: StepInput) -> Tensor:
        output = torch.empty_like(queries)
        num_chunks, table_len = step.block_tables.shape
        chunks = num_chunks, step.query_starts.data_ptr(), step.context_lens.data_ptr(), step.block_tables.data_ptr()
        cache = self._type, self._layers[layer]
        trees = (None, None) if step.trees is None else (step.trees.starts.data_ptr(), step.trees.seen.data_ptr())
        end = output.data_ptr(), torch.get_num_threads()
        self._attend(queries.data_ptr(), *self._shape, *cache, *chunks, table_len, *trees, *end)
        return output.view(step.num_tokens, -1)
