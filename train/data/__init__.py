"""What a run is trained on: rows packed once, then read in an order that the seed decides.

The way of a document, once, by `wedlm tokenize`:

    command     the command line, as a `job.TokeniseOptions`
    chunks      files become chunks of records, read with bounded memory, in a fixed order
    samples     a record becomes samples: token ids, and which of them are trained on;
    chat          a conversation through the tokenizer's chat template
    job         samples are packed into rows of one length (`wedlm_jax.packing`), part by part, so
                  that a job resumes and hosts share it
    shards      rows become files, and what is in a folder is written beside them

and in every run, by `wedlm train`:

    sources     folders are opened and checked, and how often a run reads each
    batches     step s reads these rows, shuffled and mixed by seed and weights; each host reads its
                  own ahead of the step, and places them on its devices

On the devices, `wedlm_jax.corruption` masks the rows. `tokenizer` makes a tokenizer.
"""
