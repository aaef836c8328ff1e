"""transformers, its Trainer and PEFT with the drop-in equal plain runs within rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.running import BY_HAND, ONE, OURS, TWO, need_client, start, told

Plainly = Callable[..., dict[str, Any]]
ROUNDING = {"loss": 1e-4, "eval_loss": 1e-4, "norm": 1e-4}
# The plain Trainer computes in bf16 on fp32 weights (autocast). DeepSpeed's weights are bf16.
ROUNDING_OF_BF16 = {"loss": 1e-3, "eval_loss": 1e-3, "norm": 1e-2}


def with_base(folder: Path) -> Path:
    """Return a folder with the tiny model that `pretrained` loads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.clients.program_trainer import TINY

    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Plainly:
    """Run the program without DeepSpeed once per set of options; "folder" is its output folder."""
    done: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(*words: str) -> dict[str, Any]:
        if words not in done:
            folder = with_base(tmp_path_factory.mktemp("plain"))
            done[words] = told(
                start([sys.executable], "program_trainer.py", -1, folder, *words)
            ) | {"folder": folder}
        return done[words]

    return run


def assert_same_training(
    ours: dict[str, Any], plain: dict[str, Any], rounding: dict[str, float]
) -> None:
    for key, within in rounding.items():
        assert ours[key] == pytest.approx(plain[key], rel=within), key
    assert (ours["best"] is None) == (plain["best"] is None)
    if plain["best"] is not None:
        assert Path(ours["best"]).name == Path(plain["best"]).name


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import LlamaForCausalLM

    return dict(LlamaForCausalLM.from_pretrained(folder, dtype="auto").state_dict())


def assert_same_weights(
    ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], **within: float
) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, **within)


@pytest.mark.slow  # run by `make slow`
def test_trainer_from_pretrained_at_stage_3_is_the_trainer(tmp_path: Path) -> None:
    need_client("transformers", "accelerate")
    plain = start(
        [sys.executable], "program_trainer.py", -1, with_base(tmp_path / "plain"), "pretrained"
    )
    ours = told(
        start([*OURS, *TWO], "program_trainer.py", 3, with_base(tmp_path / "ours"), "pretrained")
    )
    assert ours["world"] == 2 and ours["kinds"] == ["ShardedParameter"]
    assert_same_training(ours, told(plain), ROUNDING)
    saved = [weights_of(tmp_path / each / "final") for each in ("ours", "plain")]
    assert_same_weights(*saved, rtol=1e-3, atol=1e-4)


@BY_HAND
def test_pretrained_resized_and_generating_at_stage_3(tmp_path: Path) -> None:
    need_client("transformers", "accelerate")
    folder = with_base(tmp_path)
    plain = start([sys.executable], "program_transformers.py", folder)
    ours, alone = told(start([*OURS, *TWO], "program_transformers.py", folder)), told(plain)
    assert (
        ours["world"] == 2
        and ours["built"] == ours["kinds"] == ["ShardedParameter"]
        and alone["built"] == ["Parameter"]
    )
    assert ours["shape"] == [72, 32]
    for key in ("values", "generated", "gathered"):
        assert ours[key] == alone[key], key


@BY_HAND
@pytest.mark.parametrize(
    ("line", "words"),
    [(ONE, []), (TWO, []), (TWO, ["bf16"])],
    ids=["one rank", "two ranks", "two ranks in bf16"],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trainer_at_every_stage_saves_and_resumes(
    stage: int, line: list[str], words: list[str], plainly: Plainly, tmp_path: Path
) -> None:
    need_client("transformers", "accelerate")
    ours = told(start([*OURS, *line], "program_trainer.py", stage, tmp_path, *words))
    assert_same_training(ours, plainly(*words), ROUNDING_OF_BF16 if words else ROUNDING)
    assert ours["world"] == (2 if line is TWO else 1) and ours["kinds"] == [
        "ShardedParameter" if stage == 3 else "Parameter"
    ]
    assert ours["dtypes"] == ["torch.bfloat16" if words else "torch.float32"]
    # the best model is loaded after training
    assert ours["eval_loss"][-1] == min(ours["eval_loss"])
    assert_same_weights(
        weights_of(tmp_path / "final"), weights_of(Path(ours["best"])), rtol=0, atol=0
    )
    resumed = told(start([*OURS, *line], "program_trainer.py", stage, tmp_path, *words, "resume"))
    assert resumed["loss"] == ours["loss"] and resumed["eval_loss"] == ours["eval_loss"]


@BY_HAND
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("words", [[], ["bf16"]], ids=str)
def test_trainer_over_tensor_parallel_ranks_saves_and_resumes(
    stage: int, words: list[str], plainly: Plainly, tmp_path: Path
) -> None:
    """The batch size is correct although the Trainer counts tp ranks as data-parallel ranks.

    transformers refuses from_pretrained at stage 3 together with autotp_size.
    """
    need_client("transformers", "accelerate")
    ours = told(
        start([*OURS, *TWO], "program_trainer.py", stage, with_base(tmp_path), *words, "tp")
    )
    assert_same_training(ours, plainly(*words), ROUNDING_OF_BF16 if "bf16" in words else ROUNDING)
    assert_same_weights(
        weights_of(tmp_path / "final"), weights_of(Path(ours["best"])), rtol=0, atol=0
    )
    resumed = told(
        start([*OURS, *TWO], "program_trainer.py", stage, tmp_path, *words, "tp", "resume")
    )
    assert resumed["loss"] == ours["loss"] and resumed["eval_loss"] == ours["eval_loss"]


@BY_HAND
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trainer_over_ranks_that_share_sequences_is_the_trainer(
    stage: int, plainly: Plainly, tmp_path: Path
) -> None:
    """Ranks that share sequences train like the plain Trainer.

    The Trainer computes the loss by a differentiable gather over the ranks. Its gradient is not sp
    times too large at any stage. Such a run cannot resume within an epoch, because accelerate skips
    batches only of DataLoaders.
    """
    need_client("transformers", "accelerate")
    ours = told(start([*OURS, *TWO], "program_trainer.py", stage, tmp_path, "sp"))
    assert_same_training(ours, plainly(), ROUNDING)
    assert_same_weights(
        weights_of(tmp_path / "final"), weights_of(Path(ours["best"])), rtol=0, atol=0
    )


@BY_HAND
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("words", [["metrics"], ["bf16"]], ids=str)
def test_trainer_over_stages_is_the_trainer(
    stage: int, words: list[str], plainly: Plainly, tmp_path: Path
) -> None:
    """The Trainer gives every rank different rows, and each rank gets its losses and logits."""
    need_client("transformers", "accelerate")
    ours = told(start([*OURS, *TWO], "program_trainer.py", stage, tmp_path, *words, "pp"))
    assert_same_training(ours, plainly(*words), ROUNDING_OF_BF16 if "bf16" in words else ROUNDING)
    assert ours["mean_logit"] == pytest.approx(plainly(*words)["mean_logit"], rel=1e-3, abs=1e-4)
    assert_same_weights(
        weights_of(tmp_path / "final"), weights_of(Path(ours["best"])), rtol=0, atol=0
    )
    resumed = told(
        start([*OURS, *TWO], "program_trainer.py", stage, tmp_path, *words, "pp", "resume")
    )
    assert resumed["loss"] == ours["loss"] and resumed["eval_loss"] == ours["eval_loss"]


@BY_HAND
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_peft_lora_over_tensor_parallel_ranks(stage: int, plainly: Plainly, tmp_path: Path) -> None:
    """LoRA trains adapters of split layers and saves them as whole tensors."""
    from safetensors.torch import load_file

    need_client("transformers", "accelerate", "peft")
    words = ["pretrained", "peft"]
    ours = told(
        start([*OURS, *TWO], "program_trainer.py", stage, with_base(tmp_path), *words, "tp")
    )
    plain = plainly(*words)
    assert_same_training(ours, plain, ROUNDING)
    assert ours["dtypes"] == plain["dtypes"]
    saved = [
        load_file(folder / "final" / "adapter_model.safetensors")
        for folder in (tmp_path, plain["folder"])
    ]
    assert_same_weights(*saved, rtol=1e-3, atol=1e-5)


@BY_HAND
def test_trainer_evaluates_what_was_not_trained_at_stage_3(
    plainly: Plainly, tmp_path: Path
) -> None:
    need_client("transformers", "accelerate")
    words = ("pretrained", "untrained")
    ours = told(start([*OURS, *TWO], "program_trainer.py", 3, with_base(tmp_path), *words))
    assert_same_training(ours, plainly(*words), ROUNDING)
    assert ours["kinds"] == ["ShardedParameter"]
    assert_same_weights(
        weights_of(tmp_path / "final"), weights_of(tmp_path / "base"), rtol=0, atol=0
    )


@BY_HAND
@pytest.mark.parametrize("again", ["reentrant", "direct"])
@pytest.mark.parametrize("dtypes", ["", "mixed", "bf16"])
def test_peft_lora_at_stage_3_under_both_kinds_of_checkpointing(
    dtypes: str, again: str, plainly: Plainly, tmp_path: Path
) -> None:
    need_client("transformers", "accelerate", "peft")
    words = ["pretrained", "peft", again, *([dtypes] if dtypes else [])]
    ours = told(start([*OURS, *TWO], "program_trainer.py", 3, with_base(tmp_path), *words))
    plain = plainly(*words)
    assert_same_training(ours, plain, ROUNDING_OF_BF16 if dtypes == "bf16" else ROUNDING)
    assert ours["kinds"] == ["ShardedParameter"] and (
        dtypes == "bf16" or ours["dtypes"] == plain["dtypes"]
    )
    assert len(ours["dtypes"]) == (2 if dtypes == "mixed" else 1)
    assert (tmp_path / "final" / "adapter_model.safetensors").is_file()
    if dtypes == "mixed":
        resumed = told(start([*OURS, *TWO], "program_trainer.py", 3, tmp_path, *words, "resume"))
        assert resumed["loss"] == ours["loss"] and resumed["eval_loss"] == ours["eval_loss"]
