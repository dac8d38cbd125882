"""Suite files: the package's own, and what is said about bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tvm_comfuse.bench.suites import Row, SuiteError, load, parse, select

ROW = {"name": "a", "op": "rms", "M": 8, "N": 16, "K": 32}


def families(**row: Any) -> dict[str, Any]:
    return {"families": {"mine": {"rows": [{**ROW, **row}]}}}


def test_builtin_suites() -> None:
    suites = load()
    names = {suite: [row.name for row in rows] for suite, rows in suites.items()}
    assert names == {
        "post_norm": [
            "bert_base_attn",
            "bert_base_ffn",
            "bert_large_attn",
            "bert_large_ffn",
            "tfm_base_attn",
            "tfm_base_ffn",
            "olmo2_1b_o",
            "gemma2_2b_o",
        ],
        "row_stages": ["comfuse_ln_relu_1024", "comfuse_rms_1024", "comfuse_softcap_1024"],
        "ragged": ["ragged_m", "small_m", "wide_n", "odd_n"],
    }
    assert suites["ragged"][0] == Row("ragged", "ragged_m", "layer_norm", 4097, 768, 768, "bfloat16")


def test_own_file_and_dtype_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(families(dtype="f16")))
    assert load(path) == {"mine": [Row("mine", "a", "rms", 8, 16, 32, "float16")]}


def test_select() -> None:
    suites = load()
    assert len(select(suites)) == 15
    assert [row.name for row in select(suites, "ragged")] == ["ragged_m", "small_m", "wide_n", "odd_n"]
    assert [row.label for row in select(suites, None, ["odd_n", "row_stages/comfuse_rms_1024"])] == [
        "row_stages/comfuse_rms_1024",
        "ragged/odd_n",
    ]
    with pytest.raises(SuiteError, match="post_norm, row_stages, ragged"):
        select(suites, "postnorm")
    with pytest.raises(SuiteError, match="bert_base_attn"):
        select(suites, "ragged", ["bert_base_attn"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "object"),
        ({}, "families"),
        ({"families": {}}, "at least one family"),
        ({"families": {"mine": {}}}, "rows"),
        ({"families": {"mine": {"rows": []}}}, "list of rows"),
        ({"families": {"mine": {"rows": [ROW], "layernorm": "text"}}}, "layernorm"),
        ({"families": {"mine": {"rows": [3]}}}, "row 0"),
        ({"families": {"mine": {"rows": [ROW, ROW]}}}, "a twice"),
        ({"families": {"mine": {"rows": [{"name": "a", "op": "rms", "M": 8}]}}}, "N, K"),
        (families(op="conv"), "layer_norm.*conv"),
        (families(op=["rms"]), "op out of"),
        (families(M=0), "positive whole number for M"),
        (families(N=True), "positive whole number for N"),
        (families(K=2.5), "positive whole number for K"),
        (families(name=""), "a name"),
        (families(dtype="int8"), "int8"),
        (families(dtype=16), "16"),
        (families(dtypes="bf16"), "dtypes"),
        ({**families(), "version": 2}, "version"),
    ],
)
def test_bad_content_is_named(content: Any, words: str) -> None:
    with pytest.raises(SuiteError, match=words):
        parse(content)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(SuiteError, match="Is a directory"):
        load(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{"families": ')
    with pytest.raises(SuiteError, match=r"broken\.json.*line 1"):
        load(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SuiteError, match="JSON"):
        load(broken)
