"""Reading traces: each format, and what is said of a file that is wrong."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from router.traced_request import TracedRequest
from router.traces import TraceError, TraceOptions, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def mooncake(folder: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    return written(folder, "trace.jsonl", "\n".join(lines))


def test_mooncake_has_full_blocks_only(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (500, 1100, 7, [3, 4, 5]), (9000, 1024, 1, [3, 4]))
    assert list(read_trace(path)) == [TracedRequest(0.5, 1100, 7, (3, 4)), TracedRequest(9.0, 1024, 1, (3, 4))]


def test_mooncake_ticks_are_spread_evenly(tmp_path: Path) -> None:
    """Over three seconds, or less where the next timestamp is nearer."""
    rows = [(at_ms, 10, 1, list[int]()) for at_ms in (0, 0, 0, 3000, 3000, 4000, 4000)]
    moments = [request.at_s for request in read_trace(mooncake(tmp_path, *rows))]
    assert moments == [0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.5]


def test_mooncake_ticks_are_spread_at_random_by_seed(tmp_path: Path) -> None:
    path = mooncake(tmp_path, *[(0, 10, 1, [])] * 200, *[(3000, 10, 1, [])] * 200)
    first, again, other = (
        [request.at_s for request in read_trace(path, TraceOptions(seed=seed))] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first == sorted(first)
    assert all(at_s < 3.0 for at_s in first[:200])
    assert all(3.0 <= at_s < 6.0 for at_s in first[200:])
    assert 1.2 < sum(first[:200]) / 200 < 1.8  # uniform: 1.5, its standard error 0.06


def test_azure_begins_at_0(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", AZURE + "2023-11-16 23:59:59.9799600,4808,10\n2023-11-17 00:00:01.2300000,110,27")
    requests = list(read_trace(path))
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in requests] == [(4808, 10), (110, 27)]
    assert requests[0].at_s == 0.0
    assert requests[1].at_s == pytest.approx(1.25004, abs=1e-5)


def test_burst_gpt_leaves_out_what_failed(tmp_path: Path) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
    assert list(read_trace(written(tmp_path, "b.csv", BURST + rows))) == [
        TracedRequest(0.0, 472, 18),
        TracedRequest(113.0, 417, 276),
    ]


def test_vidur_with_and_without_times(tmp_path: Path) -> None:
    timed = written(tmp_path, "v.csv", VIDUR + "0.0,374,44\n0.5,396,109\n")
    assert list(read_trace(timed)) == [TracedRequest(0.0, 374, 44), TracedRequest(0.5, 396, 109)]
    header = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
    untimed = written(tmp_path, "w.csv", header + "30,10,40,3\n" * 2000)
    with pytest.raises(TraceError, match=r"w\.csv:1: arrived_at: .*per_s"):
        list(read_trace(untimed))
    requests = list(read_trace(untimed, TraceOptions(per_s=4.0)))
    assert requests == list(read_trace(untimed, TraceOptions(per_s=4.0)))
    assert 450 < requests[-1].at_s < 550


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", AZURE + "2023-11-16 18:17:03.97,1,1\nyesterday,1,1\n", r"a\.csv:3: TIMESTAMP: 'yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:17:03.97,,1\n", r"a\.csv:2: ContextTokens: ''"),
        ("a.csv", AZURE + "2023-11-16 18:17:03.97,1,-4\n", r"a\.csv:2: GeneratedTokens: '-4'"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:02,1,1\n", r"a\.csv:3: TIMESTAMP: .* later"),
        ("v.csv", VIDUR + "0.0,3.5,1\n", r"v\.csv:2: num_prefill_tokens: '3.5' is not a whole number"),
        ("v.csv", VIDUR + "nan,3,1\n", r"v\.csv:2: arrived_at: 'nan'"),
        ("b.csv", BURST + "5,GPT-4,12\n", r"b\.csv:2: Response tokens: None"),
        ("c.csv", "a,b\n1,2\n", r"c\.csv:1: its columns are a, b;"),
        ("c.csv", "", r"c\.csv:1: its columns are none;"),
        ("m.jsonl", '{"timestamp": 0}\n', r"m\.jsonl:1: input_length: None"),
        ("m.jsonl", '{"timestamp": 0, "input_length"\n', r"m\.jsonl:1: not JSON"),
        ("m.jsonl", "[1]\n", r"m\.jsonl:1: not a JSON object"),
        (
            "m.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n',
            r"m\.jsonl:1: hash_ids: \['a'\]",
        ),
        (
            "m.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}\n',
            r"m\.jsonl:1: hash_ids: 2 blocks of a prompt that has 1",
        ),
    ],
)
def test_says_what_is_wrong_and_where(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(read_trace(written(tmp_path, name, text)))


def test_rows_before_the_wrong_one_are_read(tmp_path: Path) -> None:
    """None is read before it is asked for, either: the file may be larger than the memory."""
    trace = read_trace(written(tmp_path, "v.csv", VIDUR + "0.0,1,1\n" * 5000 + "x,1,1\n"))
    assert len(list(islice(trace, 5000))) == 5000
    with pytest.raises(TraceError, match=":5002"):
        next(trace)
