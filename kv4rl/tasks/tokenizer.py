"""The mini model's tokenizer: one token a character, and one for the opening of the boxed answer."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, BOX = "<pad>", "<eos>", "\\boxed{"
CHARACTERS = "0123456789\n ,:;=>nkrx}+-*/()."
TOKENS = (PAD, EOS, BOX, *CHARACTERS)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer over `TOKENS`; ids are their positions. It adds no special tokens of its own.

    A character outside the vocabulary raises when encoding (there is no unknown token).
    """
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([PAD, EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False, model_max_length=2048
    )


def unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Pieces of `text`, each once, for which this tokenizer has no token, and no unknown token either.

    Only a word-level vocabulary such as the mini model's can lack any: the others fall back on bytes.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or not isinstance(core.model, models.WordLevel):
        return []  # before the vocabulary is copied: that takes longer than to encode a prompt
    known = tokenizer.get_vocab()
    if core.model.unk_token in known:
        return []
    pieces = (piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(text))
    return [piece for piece in dict.fromkeys(pieces) if piece not in known]


def save_tokenizer(directory: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json so that `AutoTokenizer.from_pretrained(directory)` loads them."""
    build_tokenizer().save_pretrained(str(directory))
