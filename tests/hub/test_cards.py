"""Cards on a Hub on loopback, through Transformers' `push_to_hub`, and what a converted model says of its origin."""

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_engram.convert import convert_backbone


REPO = "someone/some-model"


@pytest.fixture
def hub_in_use(hub, use_hub):
    use_hub(hub)
    return hub


def card_on(hub) -> str:
    return hub.read(REPO, "README.md").decode()


@pytest.fixture(params=["push_to_hub", "save_pretrained"])
def upload(request, tmp_path):
    def call(model) -> None:
        if request.param == "push_to_hub":
            model.push_to_hub(REPO)
        else:
            model.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id=REPO)

    return call


def test_our_card_follows_the_model(lively_model, hub_in_use, upload):
    """Also one that was uploaded before; it is under the Hub's name."""
    upload(lively_model())
    assert f'from_pretrained("{REPO}"' in card_on(hub_in_use) and "layers, width | 3, 32 |" in card_on(hub_in_use)
    upload(lively_model(num_hidden_layers=4))
    assert "layers, width | 4, 32 |" in card_on(hub_in_use)


def test_a_card_on_the_hub_stays(lively_model, hub_in_use, upload):
    """One that somebody has changed there; Transformers may add the model's tags to it, no more."""
    upload(lively_model())
    hub_in_use.write(REPO, "README.md", "---\nlicense: mit\ntags: [engram]\n---\n\n# Mine\n")
    upload(lively_model(num_hidden_layers=4))
    card = ModelCard(card_on(hub_in_use))
    assert card.text.strip() == "# Mine" and card.data.to_dict() == {"license": "mit", "tags": ["engram"]}


def test_a_card_in_the_folder_stays(lively_model, hub_in_use, tmp_path):
    """And is uploaded, unless somebody has written another on the Hub, which stays as well."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "README.md").write_text("# Mine\n")
    lively_model().save_pretrained(tmp_path / "local", push_to_hub=True, repo_id=REPO)
    assert card_on(hub_in_use) == (tmp_path / "local" / "README.md").read_text() == "# Mine\n"
    hub_in_use.write(REPO, "README.md", "---\ntags: [engram]\n---\n# Theirs\n")
    lively_model().save_pretrained(tmp_path / "local", push_to_hub=True, repo_id=REPO)
    assert "# Theirs" in card_on(hub_in_use)
    assert (tmp_path / "local" / "README.md").read_text() == "# Mine\n"


@pytest.fixture
def backbone(tokenizer, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(tmp_path / "base")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>").save_pretrained(
        tmp_path / "base"
    )
    return tmp_path / "base"


CONVERSION = {"engram_layer_ids": [1], "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 8}


@pytest.mark.parametrize("licence", ["apache-2.0", None])
def test_base_model_from_the_hub(backbone, hub_in_use, tmp_path, licence):
    """Its id, and its licence if its card states one."""
    from huggingface_hub import HfApi

    HfApi().create_repo("owner/base")
    HfApi().upload_folder(repo_id="owner/base", folder_path=backbone)
    if licence:
        hub_in_use.write("owner/base", "README.md", f"---\nlicense: {licence}\n---\n\n# Base\n")
    model, _ = convert_backbone("owner/base", **CONVERSION)
    model.save_pretrained(tmp_path / "converted")
    data = ModelCard.load(tmp_path / "converted" / "README.md").data
    assert data.base_model == "owner/base" and data.license == licence


@pytest.mark.parametrize("card", ["---\nlicense: mit\n---\n# Base\n", "---\nlicense: [\n---\n", None])
def test_base_model_from_a_folder(backbone, tmp_path, card):
    """A folder's name is no id on the Hub; the licence that lies there is read, and nothing is made up."""
    if card:
        (backbone / "README.md").write_text(card)
    model, _ = convert_backbone(backbone, **CONVERSION)
    assert model.config.backbone_name is None
    assert model.config.backbone_license == ("mit" if card and "mit" in card else None)
