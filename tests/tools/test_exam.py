"""Faults of Megatron-Core and of its users, which `check` has to find, and right models."""

import json
import re
import sys
from typing import Any

import pytest

from tests.scripts import REPOSITORY, run

pytestmark = pytest.mark.long

AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
REPLICAS = "--experts 4 --micro-batch-size 8"
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
UNTIED = {"share_embeddings_and_output_weights": False}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_layernorm": True, "rope_type": "rope"}
DELTA = {"deterministic_mode": True, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
MANY = {name: True for name in ("add_bias_linear", "add_qkv_bias", "gated_linear_unit")}
EXPERTS = "--experts 4 --dispatcher allgather"
BOTH = "tutorial newest"
ROUTER = r"gradients.*\n +decoder\.layers\.3\.mlp\.router\.weight"
#: Versions, options, configuration, layout, and what has to be said of it.
FAULTS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "label smoothing by parts": (BOTH, "--fault smoothing", {}, "TP2", r"loss, .*and"),
    "gathered logits": (BOTH, "--fault gathered", {}, "TP2", r"loss, .*0\.693"),
    "partial gradient": (BOTH, "--fault partial", {}, "TP2", r"core_attention\.scale.*\n"),
    "partial output norm": ("newest", "--fault delta", DELTA, "TP2", r"self_attention\.out_norm"),
    "not contiguous": ("tutorial", "--fault transposed", {}, "TP2", r"final_layernorm.* partial"),
    "auxiliary loss": ("tutorial", EXPERTS, AUX, "SP", ROUTER),
    "auxiliary loss of tokens": ("tutorial", EXPERTS, AUX, "CP2", ROUTER),
    "z loss": ("tutorial", EXPERTS, {"moe_z_loss_coeff": 1.0}, "SP", ROUTER),
    "counts in place": ("newest", f"{EXPERTS} --masked --padding", AUX, "SP", ROUTER),
    "tokens of a micro batch": ("newest", "--masked", MTP, "MB4", r"\n +mtp\.layers"),
    "tokens of a rank": ("newest", "--masked", MTP, "CP2", r"\n +mtp\.layers"),
    "position of two stages": (BOTH, "", MTP | UNTIED, "PP2", r"\n +embedding\.position_emb"),
    "norm of a rank": (BOTH, "", {"softmax_type": "learnable"}, "TP2", r"norm, .* one process"),
    "loss of replicas": (BOTH, REPLICAS, GLOBAL, "DP2xMB4", ROUTER),
    "key of a rank": (BOTH, "", MLA, "SP", r"\n +\S+3\.self_attention\.linear_kv_down_proj"),
    "sum of wholes": (BOTH, "", MLA, "TP2", r"self_attention\.q_layernorm\.weight .* 2 times"),
    "mean of a rank": (BOTH, "--masked", {"calculate_per_token_loss": False}, "CP2", r"loss, "),
}
RIGHT: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt": ("--masked", {}, "MB4,TP2,SP,PP2,VP2,DP2,DO,CP2,TP2xPP2,SPxDO,TP2xCP2"),
    "variant": ("", MANY | UNTIED | {"qk_layernorm": True}, "MB4,TP2,SP,PP2,DO,CP2"),
    "rope": ("", UNTIED | {"position_embedding_type": "rope"}, "TP2,SP,PP2,CP2"),
    "experts": (EXPERTS, {}, "MB4,SP,PP2,DO,CP2,EP2,SPxEP2,CP2xEP2,SPxCP2"),
    "sequence": (EXPERTS, AUX | {"moe_router_load_balancing_type": "seq_aux_loss"}, "MB4,DP2,EP2"),
    "mtp": ("", MTP, "TP2,SP,DO"),
}


@pytest.fixture
def check(tmp_path, request):
    def run_check(version, options, config, layouts):
        python = sys.executable
        if version == "newest":
            python = request.getfixturevalue("newest_venv") / "bin/python"
        program = REPOSITORY / "tests/tools/exam/gpt.py"
        command = [python, "-P", "-m", "tools.check", program, *options.split()]
        command += ["--config", json.dumps(config), "--layouts", layouts]
        return run(*command, cwd=tmp_path, PYTHONPATH=str(REPOSITORY))

    return run_check


@pytest.mark.parametrize(
    ("version", "name"), [(one, name) for name in FAULTS for one in FAULTS[name][0].split()]
)
def test_faults_are_found(check, version, name):
    _, options, config, layout, said = FAULTS[name]
    done = check(version, options, config, layout)
    assert done.status == 1, done.err
    assert re.search(rf"\n{layout} .*wrong: (.*\n)*?.*{said}", done.out), done.out


@pytest.mark.parametrize("version", ["tutorial", "newest"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_models_are_right(check, version, name):
    done = check(version, *RIGHT[name])
    assert done.status == 0, done.out + done.err
