"""Training data: rows that are packed once, then read in an order that the seed determines.

`wedlm tokenize` packs them, once:

    command     the command line, as a `job.TokeniseOptions`
    chunks      files become chunks of records, read with bounded memory, in a fixed order
    samples     a record becomes samples: token ids, and which of them are trained on;
    chat          a conversation through the tokenizer's chat template
    job         samples are packed into rows of one length (`wedlm_jax.packing`), part by part, so
                  that a job can resume and hosts can share it
    shards      rows become files, with a description of the folder next to them

`wedlm train` reads them, in every run:

    sources     folders are opened and checked, and their epochs counted
    batches     step s reads its rows, shuffled and mixed by seed and weights; each host reads its
                  own rows ahead of the step and places them on its devices

On the devices, `wedlm_jax.corruption` masks the rows. `tokenizer` makes a tokenizer.
"""
