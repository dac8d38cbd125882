"""A profile's file, its picture, the command, and Nsight Compute's text."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from verified_kernels import case

from tvm_comfuse.cli.main import main
from tvm_comfuse.profile import Profile, ProfileError, ncu
from tvm_comfuse.profile.picture import draw
from tvm_comfuse.profile.report import kept
from tvm_comfuse.profile.subject import Subject, find_subject
from tvm_comfuse.profile.summary import summarize
from tvm_comfuse.profile.timeline import decode
from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.instrument import instrumented
from tvm_comfuse.verify.interpreter import Program

TARGET = parse_target("h200")
#: bytes that a picture may have
SMALL = 100_000
RAW = """==PROF== Connected to process 1 (python)
==PROF== Profiling "main_kernel" - 0: 0%....100% - 9 passes
"ID","Process ID","Kernel Name","gpu__time_duration.sum",\
"sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active","launch__registers_per_thread",\
"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum","lts__throughput.avg.pct_of_peak_sustained_elapsed"
"","","","us","%","%","register/thread","","%"
"0","1","main_kernel","60.51","71.25","0","168","1,234,567","n/a"
==PROF== Disconnected
"""


@cache
def profile(name: str = "deferred_grid") -> Profile:
    """What the interpreter's stamps give."""
    given = case(name)
    kernel, layout = instrumented(given.func, given.inputs[0].shape[0], name)
    stamps = Program(kernel).run(given.inputs).stamps
    assert stamps is not None
    timelines = decode(stamps, layout)
    plan = plan_of(given.func).to_dict()
    figures = {"metrics": ncu.select(ncu.parse_raw(RAW))}
    return Profile(
        "interpreter",
        "",
        "",
        {},
        name,
        (384, 256, 576),
        plan,
        60.0,
        61.5,
        0,
        0,
        kept(timelines),
        summarize(timelines),
        figures,
    )


@pytest.fixture
def comfuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["comfuse", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = profile()
    made.write(tmp_path / "a.json")
    read = Profile.read(tmp_path / "a.json")
    assert read.timelines == made.timelines
    assert {**read.to_dict()} == json.loads((tmp_path / "a.json").read_text())
    read.write(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"summary": 1}'])
def test_a_file_that_is_no_profile(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ProfileError, match="a profile at"):
        Profile.read(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["deferred_grid", "pingpong_three"])
def test_the_picture_says_what_it_shows(name: str, tmp_path: Path) -> None:
    draw(profile(name), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    lanes = {span.lane for span in profile(name).timelines[0].spans}
    kinds = {span.kind for span in profile(name).timelines[0].spans if span.end > span.begin}
    for word in (
        *lanes,
        "step 0",
        "step 1",
        "waits: full slot",
        "main loop",
        "microseconds",
        "60.0 us a call (61.5 with stamps)",
    ):
        assert word in text, word
    assert {"full slot", "exchange"} <= kinds
    assert len(text) < SMALL
    # the same picture each time, so that it can lie in a repository
    draw(profile(name), tmp_path / "b.svg")
    assert text == (tmp_path / "b.svg").read_text()


def test_a_command_redraws_a_file(comfuse: Any, tmp_path: Path) -> None:
    profile().write(tmp_path / "a.json")
    code, out, _ = comfuse("profile", "--from", tmp_path / "a.json", "--picture", tmp_path / "a.png")
    assert code == 0
    assert "MMA group" in out
    assert "71.25" in out
    assert 0 < (tmp_path / "a.png").stat().st_size < SMALL


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--from"),
        (("bert_large_attn", "--picture", "a.pdf"), ".svg or .png"),
        (("bert_large_attn", "--json", "missing/a.json"), "directory"),
        (("--from", "missing.json"), "missing.json"),
    ],
)
def test_wrong_input(comfuse: Any, arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = comfuse("profile", *arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(comfuse: Any) -> None:
    code, _, err = comfuse("profile", "bert_large_attn")
    assert code == 2
    assert "needed a Hopper GPU" in err
    assert "--from" in err


# --- what is profiled -------------------------------------------------------------------------------------------------


def test_a_row_by_its_name_and_with_a_plan_by_itself() -> None:
    subject = find_subject("post_norm/tfm_base_attn", TARGET)
    assert subject.name == "tfm_base_attn"
    assert subject.shape == (16384, 512, 512)
    plan = {**plan_of(subject.func).to_dict(), "pipeline_depth": 2}
    assert plan_of(find_subject("tfm_base_attn", TARGET, plan).func).pipeline_depth == 2


def test_of_a_model_with_several_kernels_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n\ndef build():\n    linear = [torch.nn.Linear(64, 64) for _ in range(2)]\n"
        "    return torch.nn.Sequential(linear[0], torch.nn.GELU(), linear[1], torch.nn.LayerNorm(64)).bfloat16(), "
        "(torch.randn(32, 64).bfloat16(),)\n"
    )
    with pytest.raises(ProfileError, match="--kernel") as caught:
        find_subject(f"{tmp_path / 'model.py'}:build", TARGET)
    name = caught.value.found.split(", ")[1]
    assert find_subject(f"{tmp_path / 'model.py'}:build", TARGET, kernel=name).shape == (32, 64, 64)


def test_input_sets_exceed_the_cache_and_share_what_a_model_shares() -> None:
    subject = Subject("small", case("cooperative_grid").func, 384)
    sets = subject.inputs(300_000, device="cpu")
    moving = [x.data_ptr() != y.data_ptr() for x, y in zip(sets[0], sets[1], strict=True)]
    # x, w, bias, residual, gain, shift in the order of the kernel's parameters
    assert moving == [len(value.shape) == 2 and position != 1 for position, value in enumerate(sets[0])]
    bytes_of_set = sum(value.nbytes for value, moves in zip(sets[0], moving, strict=True) if moves)
    assert bytes_of_set * len(sets) > 3 * 300_000
    assert [list(output.shape) for output in subject.outputs("cpu")] == [[384, 128]]


# --- Nsight Compute ---------------------------------------------------------------------------------------------------


def test_figures_of_its_text() -> None:
    figures = {line["label"]: line for line in ncu.select(ncu.parse_raw(RAW))}
    assert figures["duration"] == {
        "label": "duration",
        "metric": "gpu__time_duration.sum",
        "value": 60.51,
        "unit": "us",
    }
    assert figures["tensor pipe"]["value"] == 71.25
    assert figures["shared memory bank conflicts"]["value"] == 1234567
    assert figures["registers a thread"]["value"] == 168
    # a name that is not there, and one without a number
    assert figures["DRAM throughput"]["metric"] is None
    assert figures["L2 throughput"]["value"] is None


@pytest.mark.parametrize("text", ["", "==ERROR== no permission", '"ID","a"\n', '"ID","a"\n"","us"\n'])
def test_text_without_figures(text: str) -> None:
    assert ncu.parse_raw(text) == {}


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_version_that_does_not_know_a_metric_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raw").write_text(RAW)
    fake_ncu(tmp_path, monkeypatch, f'case "$*" in *regex:sm__*) echo unknown; exit 1;; esac; cat {tmp_path / "raw"}')
    found = ncu.ask(Subject("small", case("cooperative_grid").func, 384), TARGET)
    assert found == {"metrics": ncu.select(ncu.parse_raw(RAW))}


def test_what_it_says_is_kept_where_it_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ncu(tmp_path, monkeypatch, "echo ERR_NVGPUCTRPERM >&2; exit 1")
    found = ncu.ask(Subject("small", case("cooperative_grid").func, 384), TARGET)
    assert found == {"failure": "ERR_NVGPUCTRPERM"}
    (tmp_path / "ncu").unlink()
    with pytest.raises(ProfileError, match="ncu on PATH"):
        ncu.ask(Subject("small", case("cooperative_grid").func, 384), TARGET)
