"""Any text encoder of Hugging Face, by its name there or from a folder: `hf:google/bert_uncased_L-2_H-128_A-2`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pluribus.errors import MismatchError, PackageError, UnknownNameError
from pluribus.inputs import PADDING
from pluribus.internal.blame import first_line
from pluribus.internal.late import import_late
from pluribus.models.attention import masked_mean
from pluribus.models.probe import Shape

HF = "hf:"


class Encoder(nn.Module):
    """An encoder of tokens. The features are the mean of its last states over tokens."""

    def __init__(self, net: nn.Module, padding: int, prepared: bool) -> None:
        super().__init__()
        self.net = net
        self.padding = padding  # its id of padding
        self.prepared = prepared  # whether it takes a mask that is ready to be added to attention scores

    def forward(self, x: Tensor) -> Tensor:
        mask = x != PADDING
        seen: Tensor = mask.long()
        if self.prepared:  # its own mask depends on values, which a captured step cannot read
            dtype = next(self.net.parameters()).dtype
            seen = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]
        states = self.net(input_ids=torch.where(mask, x, self.padding), attention_mask=seen, return_dict=True)
        return masked_mean(states.last_hidden_state, mask)


@dataclass(frozen=True, eq=False)
class HfBackbone:
    """Builds an encoder with random weights, for a vocabulary and a length that it has room for."""

    name: str
    config: Any

    def __call__(self, shape: Shape, vocabulary: int) -> nn.Module:
        config, known = self.config, self.config.vocab_size
        if vocabulary > known:
            raise MismatchError(
                f"model '{HF}{self.name}' knows {known} tokens, but the data have {vocabulary}. Read texts with its "
                f"tokenizer, --tokenizer {self.name}, or with --vocabulary {known}."
            )
        net = make_encoder(config)
        if (longest := _find_longest(config, net)) and shape[0] > longest:
            raise MismatchError(
                f"model '{HF}{self.name}' takes rows of up to {longest} tokens, but the data have {shape[0]}. Use "
                f"--length {longest}."
            )
        padding = config.pad_token_id if config.pad_token_id is not None else PADDING
        return Encoder(net, padding, _takes_prepared_mask(config))


def hf_backbone(name: str) -> HfBackbone:
    """The builder of an encoder. A name without a model of texts is refused."""
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of the file, of the network, or of the name
        raise UnknownNameError(
            f"model '{HF}{name}' was not found ({first_line(error)}). Use a name of huggingface.co, which is "
            f"downloaded once, or a folder that save_pretrained wrote."
        ) from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise MismatchError(
            f"model '{HF}{name}' is a {config.model_type}, which does not take tokens. Use another model."
        )
    for key, value in list(vars(config).items()):
        # Much of their dropout is not a layer, so it would have no key, and other engines would drop other units.
        if isinstance(value, float) and "drop" in key:
            setattr(config, key, 0.0)
    config.use_cache = False
    return HfBackbone(name, config)


def make_encoder(config: Any, pretrained: str | None = None) -> nn.Module:
    """The part of a model that reads tokens, without what follows its states: with random or with pretrained weights.

    Attention is written out, because fused kernels add gradients on a GPU in an order that is not fixed.
    """
    auto = _transformers().AutoModel
    if pretrained is None:
        net = auto.from_config(config, attn_implementation="eager", trust_remote_code=False)
    else:
        net = auto.from_pretrained(pretrained, config=config, attn_implementation="eager", trust_remote_code=False)
    if config.is_encoder_decoder:
        net = net.get_encoder()
    if getattr(net, "pooler", None) is not None:
        net.pooler = None
    made: nn.Module = net
    return made.float()


def _find_longest(config: Any, net: nn.Module) -> int | None:
    """The most tokens of a row. None: any number. Some encoders count positions from after the id of padding."""
    longest: int | None = getattr(config, "max_position_embeddings", None)
    positions = getattr(getattr(net, "embeddings", None), "position_embeddings", None)
    if longest and isinstance(positions, nn.Embedding) and positions.padding_idx is not None:
        return longest - positions.padding_idx - 1
    return longest


def _takes_prepared_mask(config: Any) -> bool:
    """Whether a model attends in both directions to all tokens, and takes the mask of that as it is."""
    transformers = _transformers()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if not (config.is_encoder_decoder or config.model_type in names):
        return False
    module = sys.modules[transformers.AutoModel._model_mapping[type(config)].__module__]
    has_windows = hasattr(module, "create_bidirectional_sliding_window_mask")
    return hasattr(module, "create_bidirectional_mask") and not has_windows


def _transformers() -> Any:
    try:
        return import_late("transformers")
    except ImportError as error:
        raise PackageError("models of Hugging Face need transformers: pip install 'pluribus[hf]'.") from error
