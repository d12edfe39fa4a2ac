"""GPT-2 and BERT of the package Transformers, with random weights, a tokenizer's dictionary, shared weights and LoRA of PEFT."""

import copy

import pytest
import torch

import dosimeter as dm

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

GPT2 = {
    "vocab_size": 400,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


@pytest.fixture
def texts():
    ids, mask = torch.randint(5, 400, (3, 8), generator=torch.Generator().manual_seed(0)), torch.ones(3, 8, dtype=torch.int64)
    mask[1, 6:], ids[1, 6:] = 0, 0
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})


def shown(texts):
    return sorted(tuple(row[mask.bool()].tolist()) for row, mask in zip(texts["input_ids"], texts["attention_mask"]))


def built(kind, config):
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("GPT2ForSequenceClassification", lambda: transformers.GPT2Config(**GPT2)),
        ("BertForSequenceClassification", lambda: transformers.BertConfig(**BERT)),
    ],
)
def test_classifiers(kind, config, texts):
    exposure = dm.observe(built(kind, config()), dm.Batch(texts, torch.tensor([0, 1, 1])))
    true = {token for text in shown(texts) for token in text}
    assert dm.recover_tokens(exposure, "embedding_rows").certified == true
    found = dm.recover_tokens(exposure, "dager")
    assert found.certified == true
    assert sorted(found.sequences) == shown(texts)
    assert all(found.certified_sequences)


def test_masked_language_models_share_their_weight(texts):
    targets = torch.full_like(texts["input_ids"], -100)
    targets[:, [1, 4]] = 7
    exposure = dm.observe(built("BertForMaskedLM", transformers.BertConfig(**BERT)), dm.Batch(texts, targets))
    true = {token for text in shown(texts) for token in text}
    rows = dm.recover_tokens(exposure, "embedding_rows")
    assert rows.certified == true  # the target 7 is none of the inputs
    assert rows.details["tied"]
    assert sorted(dm.recover_tokens(exposure, "dager").sequences) == shown(texts)


def test_causal_language_models_give_away_all_but_the_last_token():
    ids = torch.randint(5, 400, (3, 8), generator=torch.Generator().manual_seed(1))
    model = built("GPT2LMHeadModel", transformers.GPT2Config(**GPT2))
    exposure = dm.observe(model, dm.Batch(ids, ids), loss=dm.TokenCrossEntropy(shift=True))
    assert dm.recover_tokens(exposure, "embedding_rows").certified == set(ids[:, :-1].flatten().tolist())
    assert sorted(dm.recover_tokens(exposure, "dager").sequences) == sorted(map(tuple, ids[:, :-1].tolist()))


def test_a_state_dict_of_peft_is_received(texts):
    """One step of SGD on the adapter, sent as PEFT names it: the text is proved from what was received."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = built("GPT2ForSequenceClassification", transformers.GPT2Config(**GPT2))
    settings = peft.LoraConfig(r=16, target_modules=["c_attn", "c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    server = peft.get_peft_model(model, settings).eval()
    client, one = copy.deepcopy(server), {name: tensor[:1] for name, tensor in texts.items()}
    optimizer = torch.optim.SGD([parameter for parameter in client.parameters() if parameter.requires_grad], lr=0.1)
    torch.nn.functional.cross_entropy(client(**one).logits, torch.tensor([1])).backward()
    optimizer.step()
    sent, training = peft.get_peft_model_state_dict(client), dm.FedAvg(learning_rate=0.1, steps=1)
    exposure = dm.receive(server, sent, kind="weights", training=training, batch_size=1, input_shape=(8,))
    found = dm.recover_tokens(exposure, "dager")
    assert list(found.sequences) == [tuple(one["input_ids"][0].tolist())]
    assert all(found.certified_sequences)


def test_lora_of_peft(texts):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = built("GPT2ForSequenceClassification", transformers.GPT2Config(**GPT2))
    settings = peft.LoraConfig(r=16, target_modules=["c_attn", "c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    one = {name: tensor[:1] for name, tensor in texts.items()}
    exposure = dm.observe(peft.get_peft_model(model, settings).eval(), dm.Batch(one, torch.tensor([1])))
    with pytest.raises(dm.Refused, match="does not train the embedding"):
        dm.recover_tokens(exposure, "embedding_rows")
    found = dm.recover_tokens(exposure, "dager")
    assert list(found.sequences) == [tuple(one["input_ids"][0].tolist())]
    assert all(found.certified_sequences)
