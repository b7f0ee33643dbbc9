"""A checkpoint small enough to decode in a test: one layer of random weights, and a tokenizer."""

from flax import nnx

from train.data.tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer
from wedlm_jax.checkpoint.model import save_checkpoint
from wedlm_jax.config import ModelConfig
from wedlm_jax.model import Transformer

VOCAB_SIZE = 300
CONTEXT = 320
EOS, MASK = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|mask|>")

PROMPTS = ["the cat", "one two three", "naïve 日本", "12 + 30 = ", "a", "mat", "= 42", "on on on"]
TEXTS = ["the cat sat on the mat", "one two three four", "日本語 naïve café", "12 + 30 = 42"]


def write_tiny_checkpoint(folder, *, tokenizer=True):
    """Writes it, with weights so large that what it says wanders, and sometimes ends."""
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        qk_norm=True,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
    )
    save_checkpoint(Transformer(config, rngs=nnx.Rngs(3)), config, folder)
    if tokenizer:
        save_tokenizer(train_tokenizer(TEXTS, VOCAB_SIZE), folder)
    return folder
