"""Every C kernel, of every build that this CPU can run, against plain torch in float64 or float32, over shapes that fit
nothing evenly."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.kernels import library as compiled
from model.kernels.library import Build, KernelsUnavailable
from model.kernels.parts import (
    SIGNATURES,
    KernelFeedForward,
    KernelLikeliest,
    KernelLinear,
    KernelMoE,
    KernelNorm,
    eight_bit_rows,
    library,
)
from model.likeliest import torch_likeliest
from model.moe import Expert, TorchMoE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Kernels:
    build: Build
    library: ctypes.CDLL

    def error(self, dtype: torch.dtype, least: float = 2e-6) -> float:
        """What `close` should allow: of an activation AMX takes 16 bits, and AVX512_BF16 the 8 that bfloat16 has. Both
        do so for weights of bfloat16 only."""
        if dtype != torch.bfloat16:
            return least
        return {"amx": 1.5e-5, "avx512_bf16": 1.5e-2}.get(self.build.name, least)


BUILDS = [*compiled.builds(), *([compiled.AVX512_BF16] if compiled.can_round() else [])]


@pytest.fixture(params=BUILDS, ids=lambda build: build.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(*library(request.param))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Relative to the largest value: sums of many terms have no smaller error."""
    expected = expected.double()
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (3, 7), (25, 40), (67, 33), (130, 805), (9, 1600)])
def test_linear(kernels: Kernels, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    weight = random(num_outputs, num_inputs, dtype=dtype)
    linear = KernelLinear(kernels.library, [weight], [None])
    for num_tokens in (*range(1, 14), 31, 47, 48, 70):
        x = random(num_tokens, num_inputs, seed=num_tokens)
        close(linear(x), x.double() @ weight.double().T, kernels.error(dtype))


@pytest.mark.skipif(not compiled.can_round(), reason="this CPU has no products of bfloat16")
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(3, 7), (25, 40), (130, 805), (9, 1600)])
def test_rounded_activations_lose_nothing_else(num_outputs: int, num_inputs: int) -> None:
    weight = random(num_outputs, num_inputs, dtype=torch.bfloat16)
    linear = KernelLinear(library(compiled.AVX512_BF16)[1], [weight], [None])
    for num_tokens in (*range(1, 18), 70):
        x = random(num_tokens, num_inputs, seed=num_tokens)
        close(linear(x), x.bfloat16().double() @ weight.double().T)


def widened(rows: Tensor, num_inputs: int) -> Tensor:
    """What rows of eight bits stand for, in float64."""
    scales = rows[:, -4:].contiguous().view(torch.float32)
    return rows[:, :num_inputs].double() * scales.double()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (3, 7), (25, 40), (67, 33), (130, 805), (9, 1600)])
def test_eight_bit_rows_are_within_half_a_step(num_outputs: int, num_inputs: int) -> None:
    weight = random(num_outputs, num_inputs, scale=3.0)
    weight[0] = 0.0
    error = (widened(eight_bit_rows(weight), num_inputs) - weight.double()).abs()
    step = weight.double().abs().amax(dim=1, keepdim=True) / 127
    assert bool((error <= 0.5001 * step).all())


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (3, 7), (25, 40), (67, 33), (130, 805), (9, 1600)])
def test_linear_of_eight_bits(kernels: Kernels, num_outputs: int, num_inputs: int) -> None:
    rows = eight_bit_rows(random(num_outputs, num_inputs))
    linear = KernelLinear(kernels.library, [rows], [None])
    for num_tokens in (*range(1, 14), 31, 47, 48, 70):
        x = random(num_tokens, num_inputs, seed=num_tokens)
        seen = x.bfloat16() if kernels.build == compiled.AVX512_BF16 else x
        close(linear(x), seen.double() @ widened(rows, num_inputs).T)


@pytest.mark.parametrize("num_tokens", [1, 5, 50])
def test_feed_forward_of_eight_bits(kernels: Kernels, num_tokens: int) -> None:
    matrices = [random(70, 33, seed=1), random(70, 33, seed=2), random(33, 70, seed=3)]
    rows = [eight_bit_rows(matrix) for matrix in matrices]
    gate, up, down = (widened(row, matrix.shape[1]) for row, matrix in zip(rows, matrices, strict=True))
    x = random(num_tokens, 33, seed=num_tokens)
    expected = (F.silu(x.double() @ gate.T) * (x.double() @ up.T)) @ down.T
    y = torch.zeros(num_tokens, 33)
    KernelFeedForward(kernels.library, Expert(*rows))(x, add_to=y)
    close(y, expected, kernels.error(torch.bfloat16) if kernels.build == compiled.AVX512_BF16 else 2e-6)


@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_linear_with_parts_biases_and_sum(kernels: Kernels, num_tokens: int) -> None:
    weights = [random(rows, 50, dtype=torch.bfloat16, seed=rows) for rows in (40, 9, 25)]
    biases = [random(40, dtype=torch.bfloat16), None, random(25, dtype=torch.bfloat16)]
    x, before = random(num_tokens, 50), random(num_tokens, 74, seed=3)
    parts = [F.linear(x, w.float(), None if b is None else b.float()) for w, b in zip(weights, biases, strict=True)]
    expected = torch.cat(parts, dim=-1)
    linear = KernelLinear(kernels.library, weights, biases)
    close(linear(x), expected, kernels.error(torch.bfloat16))
    total = before.clone()
    assert linear(x, add_to=total) is total
    close(total, before + expected, kernels.error(torch.bfloat16))


def test_linear_reads_unaligned_weights(kernels: Kernels) -> None:
    """A safetensors file puts a tensor wherever the one before it ends."""
    weight = random(20 * 24 + 3, dtype=torch.bfloat16)[3:].view(20, 24)
    x = random(7, 24)
    close(
        KernelLinear(kernels.library, [weight], [None])(x),
        x.double() @ weight.double().T,
        kernels.error(torch.bfloat16),
    )


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_bits_do_not_depend_on_batch_or_threads(kernels: Kernels, num_threads: int) -> None:
    weight, x = random(700, 300, dtype=torch.bfloat16), random(64, 300)
    linear, before = KernelLinear(kernels.library, [weight], [None]), torch.get_num_threads()
    single = torch.cat([linear(row) for row in x.split(1)])
    try:
        torch.set_num_threads(num_threads)
        for num_tokens in (2, 3, 4, 5, 6, 7, 16, 17, 32, 33, 47, 48, 64):
            assert torch.equal(linear(x[:num_tokens]), single[:num_tokens])
    finally:
        torch.set_num_threads(before)


def test_several_callers_at_once(kernels: Kernels) -> None:
    """Only one of them gets the helper threads; all get the right result."""
    weight, x = random(700, 300), random(64, 300)
    linear, barrier = KernelLinear(kernels.library, [weight], [None]), threading.Barrier(4)
    expected = linear(x)

    def call() -> bool:
        barrier.wait()
        return all(torch.equal(linear(x), expected) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(future.result() for future in [pool.submit(call) for _ in range(4)])


@pytest.mark.parametrize("size", [1, 8, 37, 576])
def test_norm(kernels: Kernels, size: int) -> None:
    x, weight = random(21, size, scale=3.0), random(size, dtype=torch.bfloat16, seed=1)
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    close(KernelNorm(kernels.library, weight, 1e-5)(x), expected)


def expert(num_inner: int, num_inputs: int, dtype: torch.dtype, seed: int) -> Expert:
    gate, up = (random(num_inner, num_inputs, dtype=dtype, seed=seed + i, scale=0.3) for i in range(2))
    return Expert(gate, up, random(num_inputs, num_inner, dtype=dtype, seed=seed + 2, scale=0.3))


def swiglu(x: Tensor, e: Expert) -> Tensor:
    gate, up, down = (matrix.double() for matrix in (e.gate, e.up, e.down))
    return (F.silu(x.double() @ gate.T) * (x.double() @ up.T)) @ down.T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inner", "num_inputs"), [(5, 3), (52, 36), (130, 70)])
@pytest.mark.parametrize("num_tokens", [1, 7, 60, 600])
def test_feed_forward(kernels: Kernels, dtype: torch.dtype, num_inner: int, num_inputs: int, num_tokens: int) -> None:
    one = expert(num_inner, num_inputs, dtype, seed=5)
    x, before = random(num_tokens, num_inputs, scale=4.0), random(num_tokens, num_inputs, seed=9)
    total = before.clone()
    assert KernelFeedForward(kernels.library, one)(x, add_to=total) is None
    close(total, before + swiglu(x, one), kernels.error(dtype, 5e-6))


def test_feed_forward_of_extreme_gates(kernels: Kernels) -> None:
    """silu is x or 0 far out, and neither overflows nor gives NaN."""
    one = Expert(torch.eye(4), torch.eye(4), torch.eye(4))
    x, total = torch.tensor([[-1e4, -90.0, 90.0, 1e4]]), torch.zeros(1, 4)
    KernelFeedForward(kernels.library, one)(x, add_to=total)
    torch.testing.assert_close(total, torch.tensor([[0.0, 0.0, 8100.0, 1e8]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "per_token"), [(1, 1), (5, 2), (8, 8), (40, 3)])
@pytest.mark.parametrize("num_tokens", [1, 3, 33, 530])
def test_mixture(kernels: Kernels, dtype: torch.dtype, num_experts: int, per_token: int, num_tokens: int) -> None:
    experts = [expert(20, 12, dtype, seed=10 * i) for i in range(num_experts)]
    router = random(num_experts, 12, dtype=dtype, seed=77)
    x, before = random(num_tokens, 12), random(num_tokens, 12, seed=9)
    if kernels.build == compiled.AVX512_BF16:
        x = x.bfloat16().float()  # or near ties between experts may go the other way
    wide = [Expert(e.gate.double(), e.up.double(), e.down.double()) for e in experts]
    expected = before.double()
    expected_load = TorchMoE(wide, router.double(), per_token)(x.double(), add_to=expected)
    total = before.clone()
    load = KernelMoE(kernels.library, experts, router, per_token)(x, add_to=total)
    assert load is not None and expected_load is not None
    assert load.tolist() == expected_load.tolist()
    assert int(load.sum()) == num_tokens * per_token
    close(total, expected, kernels.error(dtype, 5e-6))


def test_every_kernel_is_called_with_the_types_it_has_in_c() -> None:
    """ctypes cannot see a prototype: an argument too few, or a long passed as an int, would be read as garbage."""
    source = "".join(path.read_text() for path in compiled.SOURCES.glob("*.c"))
    prototypes = dict(re.findall(r"^void (\w+)\(([^)]*)\) \{", source, flags=re.MULTILINE))
    of_word = {"float": ctypes.c_float, "int": ctypes.c_int, "long": ctypes.c_long}
    for name, types in SIGNATURES.items():
        words = [parameter.split() for parameter in prototypes[name].split(",")]
        expected = [ctypes.c_void_p if "*" in "".join(parts) else of_word[parts[0]] for parts in words]
        assert list(types) == expected, name


def test_without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled.load.cache_clear()
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-cc"))
    with pytest.raises(KernelsUnavailable, match="no-cc cannot be run"):
        compiled.load_fastest()
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(KernelsUnavailable, match="no such header"):
        compiled.load_fastest()
    assert list((tmp_path / "kernels").iterdir()) == []


def test_without_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_cpu_features", lambda: {"sse2", "fma"})
    with pytest.raises(KernelsUnavailable, match="this CPU lacks avx2, f16c"):
        compiled.load_fastest()


def test_the_fastest_build_that_cpu_system_and_compiler_support(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    everything = {feature for build in compiled.BUILDS for feature in build.needed_of_cpu}
    monkeypatch.setattr(compiled, "_cpu_features", lambda: everything)
    monkeypatch.setattr(compiled, "_tiles_permitted", lambda: True)
    assert compiled.builds() == [compiled.AMX, compiled.AVX512, compiled.AVX2]
    monkeypatch.setattr(compiled, "_tiles_permitted", lambda: False)
    assert compiled.builds() == [compiled.AVX512, compiled.AVX2]
    monkeypatch.setattr(compiled, "_cpu_features", lambda: everything - {"avx512vl"})
    assert compiled.builds() == [compiled.AVX2]

    old = tmp_path / "cc"
    old.write_text('#!/bin/sh\ncase "$*" in *avx512*) exit 1;; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    compiled.load.cache_clear()
    monkeypatch.setattr(compiled, "_cpu_features", lambda: everything)
    assert compiled.load_fastest()[0] == compiled.AVX2


@pytest.mark.parametrize("size", [1, 3, 15, 64, 65, 200, 8192])
@pytest.mark.parametrize("count", [1, 4, 10])
def test_likeliest(kernels: Kernels, size: int, count: int) -> None:
    scores = random(3, size, scale=3.0)
    columns, shares = KernelLikeliest(kernels.library)(scores, count)
    ordered = scores.double().log_softmax(dim=-1).sort(dim=-1, descending=True)
    assert columns.tolist() == ordered.indices[:, :count].tolist()
    assert (shares.double() - ordered.values[:, :count]).abs().max() < 2e-6


@pytest.mark.parametrize("implementation", ["c", "torch"])
def test_likeliest_where_scores_are_no_numbers(kernels: Kernels, implementation: str) -> None:
    find = KernelLikeliest(kernels.library) if implementation == "c" else torch_likeliest
    scores = torch.full((5, 100), -torch.inf)
    scores[0, [7, 90]] = torch.tensor([1.0, 2.0])  # two have a chance
    scores[2, 50], scores[3, 50] = torch.nan, torch.inf  # and in row 1 none
    scores[4, [3, 70]] = -1e30
    columns, shares = find(scores, 3)
    assert columns[0, :2].tolist() == [90, 7]
    assert shares[0].exp().tolist() == pytest.approx([1 / (1 + 1 / torch.e), 1 / (1 + torch.e), 0.0])
    assert shares[1].tolist() == [-torch.inf] * 3
    assert bool(shares[2:4].isnan().all())
    assert shares[4, :2].exp().tolist() == pytest.approx([0.5, 0.5])


def test_of_equals_the_first_is_likeliest(kernels: Kernels) -> None:
    scores = torch.zeros(1, 200)
    scores[0, 150:] = 1.0
    assert KernelLikeliest(kernels.library)(scores, 4)[0].tolist() == [[150, 151, 152, 153]]


@pytest.mark.parametrize("build", [*compiled.BUILDS, compiled.AVX512_BF16], ids=lambda build: build.name)
def test_every_build_compiles_without_a_warning(build: Build) -> None:
    """What this CPU cannot run, too: nobody would notice otherwise until it runs the slower one elsewhere."""
    sources = sorted(map(str, compiled.SOURCES.glob("*.c")))
    flags = [*compiled.FLAGS, *build.flags, "-Werror", "-fsyntax-only"]
    found = subprocess.run(["cc", *flags, *sources], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (0, "")
