"""A byte-level BPE tokenizer, trained in place in the layout that ``transformers`` loads."""

from __future__ import annotations

import json
from pathlib import Path

from ffn_faas.demo.corpus import CORPUS

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 768


def train(directory: Path) -> tuple[int, list[int]]:
    """Write the tokenizer's files into ``directory``.

    Returns the vocabulary's size and the ids that occur when the corpus is encoded: the only ones a model trained on
    it would ever say.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.strip().splitlines(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer.get_vocab_size(), sorted(set(tokenizer.encode(CORPUS).ids))
