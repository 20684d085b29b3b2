"""Secrets are hidden; other text stays readable."""

from __future__ import annotations

import json

import pytest

from deepspeed_ucp.secrets import HIDDEN, hide_text, hide_values

SECRET = "S3cr3tS3cr3tS3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f'"api_key": "{SECRET}", "x": 1',
        f"'secret': '{SECRET}'",
        f"obstore got key={SECRET}, anon=False",
        f"train.py --hub_token {SECRET} --lr 1",
        f"--wandb-api-key={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"header Bearer {SECRET}",
        f"https://user:{SECRET}@host/run",
        f"X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}",
        f"hf_{SECRET}{SECRET}",
        f"password: {SECRET}",
        f'"password": "two words {SECRET}"',
        f'{{\\"secret\\": \\"{SECRET}\\"}}',
        f"ds_ucp run --api-key {SECRET} train.py",
        f"AccountKey={SECRET}==;EndpointSuffix=x",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_in_text_are_hidden(text: str) -> None:
    assert SECRET not in hide_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'mu_product'",
        "h.0.weight: expected [4, 4], found [8, 4]; keys: a, b",
        "max_new_tokens=5, tokenizer_name: gpt2, vocab tokens 32000",
        "author: somebody, authentic text",
        "https://host:9000/run, http://host/run.",
        "the key of the state dict is not there: h.0",
        "unexpected token at line 3",
        "checkpoints/global_step4/mp_rank_00_model_states.pt",
    ],
)
def test_other_text_is_unchanged(text: str) -> None:
    assert hide_text(text) == text


def test_configurations_keep_their_form() -> None:
    config = {
        "train_batch_size": 8,
        "wandb": {"enabled": True, "api_key": SECRET, "team": "t"},
        "checkpoint": {
            "universal": {
                "also": [f"s3://KEY:{SECRET}@bucket/run"],
                "storage_options": {
                    "endpoint_url": f"https://user:{SECRET}@host:9000",
                    "anon": False,
                    "anything": SECRET,
                    "client_kwargs": {"odd": SECRET, "verify": True},
                },
            }
        },
        "password": 12345,
        "token": None,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    found = hide_values(config)
    assert SECRET not in json.dumps(found)
    assert "12345" not in json.dumps(found)
    assert found["wandb"] == {"enabled": True, "api_key": HIDDEN, "team": "t"}
    options = found["checkpoint"]["universal"]["storage_options"]
    assert options["endpoint_url"].endswith("@host:9000")
    assert options["anon"] is False
    assert options["client_kwargs"] == {"odd": HIDDEN, "verify": True}
    assert (found["train_batch_size"], found["token"], found["data_types"]) == (8, None, config["data_types"])
