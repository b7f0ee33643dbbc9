#!/bin/sh
# Trains the model of wedlm_jax/embedded anew, from nothing: `make embedded`.
set -eu

data=runs/embedded_data
mkdir -p $data

# Writes the conversations of a stage. Arguments: its name, seed, samples, and shares of the regimes.
corpus() {
    python -m examples.embedded.corpus $data/$1.jsonl --form conversations --split train \
        --seed $2 --samples $3 --weights $4
}

# Packs them and trains. Arguments: the stage, its block size, end tokens after each answer, and
# the folder of its tokenizer.
stage() {
    wedlm tokenize --input $data/$1.jsonl --output $data/$1 --tokenizer $4 --row-length 192 \
        --block-size $2 --end-tokens $3
    wedlm train --config configs/embedded_$1.yaml
}

usual="0.42 0.50 0.08"
corpus ar 1 60000 "$usual"
corpus wedlm 2 110000 "$usual"
corpus ends 3 50000 "$usual"
corpus suffixes 4 56000 "$usual"
corpus words 5 56000 "0.34 0.38 0.28"

wedlm tokenizer --input $data/ar.jsonl --vocab-size 1536 --output $data/tokenizer
stage ar 16 0 $data/tokenizer
stage wedlm 32 0 $data/tokenizer
stage ends 32 16 $data/tokenizer
stage suffixes 16 16 $data/tokenizer
python -m examples.embedded.words runs/embedded_suffixes/hf runs/embedded_vocabulary
stage words 16 16 runs/embedded_vocabulary
python -m examples.embedded runs/embedded_words/hf wedlm_jax/embedded
