"""Jobs that are killed, stopped, damaged, taken over and run side by side, in any order: no kept
record is lost or decoded again, nothing of another job gets in, and the output is that of a job
to which nothing happened."""

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from rich.console import Console

import infer.job.shard_folder
from infer.job.input import Workload
from infer.job.job import Job, JobOptions
from infer.job.part_file import PartFile
from tests.infer.job.job_examples import ask_to_end, lines, quick_run, words
from wedlm_jax.errors import STORAGE_FAILED, InputError, StorageFailure, exit_status
from wedlm_jax.host.processes import Host
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

SAMPLES = {"prompt": "a", "sampling": {"n": 2}, "result": 0}
REQUEST = {"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 9}}
RECORDS = [*words(3), SAMPLES, {"prompt": 5}, *words(2)]
OUTPUTS = ("out", "out.jsonl", "out.parquet")
JOBS = [*itertools.product((0, 1), (3, 4))]
"""Each is a seed and a shard size."""
ALL = {*range(8)}
"""The numbers of the records."""
WHOLE = {}
"""The files that an undisturbed job leaves, by output and job."""
HEADERS = {}
"""The beginning of its part files, which identifies the job, by output and job."""

# --- what may happen ------------------------------------------------------------------------

Run = namedtuple(
    "Run",
    ["what", "at", "seed", "size", "overwrite", "host", "pipe", "batch", "grace", "of"],
    defaults=["", 0, 0, 3, False, (0, 1), False, 3, 20.0, ""],
)
"""A process of the job with this seed and shard size; None takes that of the job that is there, or
3. ``what`` happens at its operation ``at``, counting only those with the name ``of`` if it has one:
a key of `ENDS`, or other events, in a tuple."""
ENDS = {"kill": -signal.SIGKILL, "SIGTERM": 143, "Ctrl-C": 130, "full disk": STORAGE_FAILED}
"""The status of a process that ends so, if it has not ended before."""

Remove = namedtuple("Remove", ["name"])
"""Somebody removes the output "file", the "folder" of shards, or the first such file in it."""

Tail = namedtuple("Tail", ["cut", "garbage", "split"], defaults=[0, b"", False])
"""Each part file loses bytes at its end and gets others; or there are two with half the records
each, as two processes may leave them."""

GARBAGE = [
    b"",
    b"\0" * 4096,
    b'{"row": 7000, "result": {}}\n',
    b'{"row": 7}\n',
    b'{"row": "7", "result": {}}\n{"row": 7, "result": {}}\n',
    b"[]\n",
    b"\xff\n",
    b'{"row": 7, "result": {"id": 2',
    b'{"row": 7, "result": {"id": 2}}',
]


class Killed(BaseException):
    """In the place of SIGKILL."""


class Process:
    """A process that carries out a `Run`, and what the test knows about it.

    Attributes:
      job, run: what it does.
      before, kept, refused: the files it finds, the records that it must not decode, and whether
        it must leave all to another job.
      prepared, added: the records that it has begun and ended.
      under_way: those it had begun when SIGTERM came.
      taken: the files when another job has taken the folder from it.
      disturbed: whether it may fail, as what it had was removed meanwhile.
    """

    running = alone = opened = happened = killed = claimed = disturbed = False
    under_way = taken = None

    def __init__(self, run, job):
        self.run, self.job, self.operations = run, job, Counter()
        self.prepared, self.added, self.parts, self.unwritten = [], set(), [], []


class World:
    """An output and the processes that work on it: the last of them runs, the others wait."""

    def __init__(self, output, llm, patch):
        self.llm, self.output = llm, output
        self.folder = Path(output if output == "out" else f"{output}.shards")
        self.file = None if output == "out" else Path(output)
        self.processes, self.names, self.operations = [], itertools.count(), 0
        self.watch(patch)
        # A request of the API has no columns.
        self.content = lines(
            [*RECORDS, *words(1)] if output == "out.parquet" else [*RECORDS, REQUEST]
        )
        Path("in.jsonl").write_bytes(self.content)
        for job in JOBS:
            if (output, job) not in WHOLE:
                self.clear()
                assert self.end_of(self.process(Run(seed=job[0], size=job[1])))[0] == 0
                WHOLE[output, job] = self.files()
                ends = (".jsonl", ".manifest.json")
                shards = [f"{name}{end}" for name in self.shards(job) for end in ends]
                names = ["job.json", "stats.json", *([] if self.file else shards)]
                names = [f"{self.folder}/{name}" for name in names]
                assert self.files().keys() == {*names, str(self.file or names[0])}
        self.clear()

    def clear(self):
        for path in Path().glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    # --- processes ----------------------------------------------------------------------------

    def watch(self, patch):
        """Notes what processes do, and lets something happen before any operation on files."""

        def watched(owner, name, fails):
            real = getattr(owner, name)

            def call(*arguments, **options):
                if self.processes and threading.current_thread() is threading.main_thread():
                    row = arguments if name == "_append" else None
                    self.operation(self.processes[-1], name, fails, row)
                return real(*arguments, **options)

            patch.setattr(owner, name, call)

        patch.setattr(os, "fsync", lambda descriptor: None)  # a disk takes long for it
        for owner, names, fails in (
            (os, ("replace", "fsync", "link"), True),
            (Path, ("mkdir",), True),
            (PartFile, ("_append",), True),
            (os, ("listdir",), False),
            (Path, ("read_bytes", "unlink"), False),
        ):
            for name in names:
                watched(owner, name, fails)
        opened, add, prepare = Path.open, PartFile.add, Workload.prepare
        alone = infer.job.shard_folder.alone

        def noting_open(path, mode="r", *arguments, **options):
            file = opened(path, mode, *arguments, **options)
            if self.processes and path.suffix == ".part" and "+" in mode:
                self.processes[-1].parts.append(file)
            return file

        def noting_add(part, number, record):
            process = self.processes[-1]
            add(part, number, record)
            process.added.add(number)
            HEADERS.setdefault(
                (self.output, process.job), json.dumps(part._header).encode().partition(b'"sh')[0]
            )

        def noting_prepare(workload, llm, record, content):
            process = self.processes[-1]
            assert record.number not in process.kept, "it is decoded twice"
            process.prepared.append(record.number)
            return prepare(workload, llm, record, content)

        def remove_tree(folder, ignore_errors):
            for path in sorted(folder.iterdir()):
                path.unlink()
            folder.rmdir()

        @contextlib.contextmanager
        def noting_alone(folder):
            process = self.processes[-1]
            with alone(folder):
                process.alone = True
                try:
                    yield
                finally:
                    process.alone, process.opened = False, True

        def run(llm, *arguments, **options):
            sizes = SimpleNamespace(max_batch_size=self.processes[-1].run.batch)
            return quick_run(SimpleNamespace(options=sizes), *arguments, **options)

        patch.setattr(Path, "open", noting_open)
        patch.setattr(PartFile, "add", noting_add)
        patch.setattr(Workload, "prepare", noting_prepare)
        patch.setattr(LLM, "run", run)
        patch.setattr("infer.job.shard_folder.alone", noting_alone)
        patch.setattr("infer.job.shard_folder.shutil", SimpleNamespace(rmtree=remove_tree))
        patch.setattr("infer.job.shard_folder.folder_digest", lambda folder: "a checkpoint")
        patch.setattr("infer.job.part_file.writer_name", self.new_name)
        patch.setattr("infer.job.job.SHARD_SIZE", 3)

    def new_name(self):
        return f"host-{7919 * next(self.names) % 997:03}"

    def operation(self, process, name, fails, row):
        """Called before each operation of a process; ``fails``: on a full disk. Of a ``row`` that
        is appended, half is written before a kill."""
        run, what = process.run, process.run.what
        if process.killed:
            raise Killed
        if process.happened:
            return
        process.operations.update(["", name])
        too_early = (what == "full disk" and not fails) or (type(what) is tuple and process.alone)
        if not what or process.operations[run.of] <= run.at or too_early:
            return
        process.happened = True
        if what == "kill" or (what == "SIGTERM" and not process.running):
            if row is not None:
                part, number, text = row
                part._file.write(b'{"row": %d, "result": ' % number + text[: len(text) // 2])
                part._file.flush()
            process.killed = True
            for part in process.parts:
                if not part.closed:
                    descriptor = os.dup(part.fileno())
                    process.unwritten.append((descriptor, os.fstat(descriptor).st_size))
            raise Killed
        if what == "Ctrl-C":
            raise KeyboardInterrupt
        if what == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if what == "SIGTERM":
            process.under_way = [*process.prepared]
            ask_to_end()
            return
        job, mine, done = process.job, self.owner() == process.job, self.is_done(process.job)
        # Whoever finds or makes the job complete removes copies of pipes, whosever they are.
        process.disturbed = run.pipe and any(isinstance(event, Run) for event in what)
        for event in what:
            self.happen(event)
        # A job that takes the folder removes what is in it, though it may die before it has it.
        removes = any(isinstance(event, Remove) or event.overwrite for event in what)
        if not process.opened:
            self.look(process)
        elif self.owner() is None or (removes and self.owner() == job):
            process.disturbed, process.kept = True, set()
        elif mine and self.owner() != job:
            process.taken, process.disturbed = self.files(), done
        elif not (self.file and self.is_done(job)):
            process.kept |= self.kept(job) - {*process.prepared}

    def process(self, run):
        process = Process(run, (run.seed, run.size or (self.owner() or (0, 3))[1]))
        self.look(process)
        return process

    def look(self, process):
        """Notes what a process finds when it opens the folder."""
        process.before, process.kept = self.files(), self.kept(process.job)
        process.refused = not process.run.overwrite and self.refuses(process.job)
        process.was_done = self.is_done(process.job) and process.kept == ALL

    def end_of(self, process):
        """Runs a process; returns its status and what it printed."""
        run, printed = process.run, io.StringIO()
        options = JobOptions(
            inputs=("-" if run.pipe else "in.jsonl",),
            output=self.output,
            params=SamplingParams(max_tokens=24, temperature=1.0, seed=run.seed),
            shard_size=run.size,
            host=Host(*run.host),
            overwrite=run.overwrite,
            grace=run.grace,
        )
        stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(self.content))
        self.processes.append(process)
        try:
            job = Job(options)
            job.console = Console(file=printed, highlight=False, soft_wrap=True)
            process.running = True
            status = job.run(lambda: self.llm)
        except Killed:
            status = ENDS["kill"]
        except (InputError, StorageFailure, KeyboardInterrupt) as error:
            status = exit_status(error)
            printed.write(str(error))
        finally:
            sys.stdin, process.claimed = stdin, process.running and job.folder is not None
            self.processes.pop()
            for part in process.parts:
                part.close()
            for descriptor, size in process.unwritten:  # what was in a buffer is lost
                os.ftruncate(descriptor, size)
                os.close(descriptor)
        return status, printed.getvalue()

    # --- what is on the disk ------------------------------------------------------------------

    def files(self):
        roots = [path for path in (self.file, self.folder) if path is not None]
        paths = itertools.chain.from_iterable([root, *root.rglob("*")] for root in roots)
        found = {str(path): path.read_bytes() for path in paths if path.is_file()}
        stats = str(self.folder / "stats.json")
        if stats in found:
            found[stats] = {**json.loads(found[stats]), "last_run": None}
        return found

    def owner(self):
        path = self.folder / "job.json"
        found = json.loads(path.read_bytes()) if path.exists() else None
        return found and (found["settings"]["params"]["seed"], found["shard_size"])

    def is_done(self, job):
        """Whether the job is marked as finished, with an output of the size it had."""
        stats = self.folder / "stats.json"
        if self.owner() != job or not stats.exists():
            return False
        size = self.file and json.loads(stats.read_bytes())["output"]["bytes"]
        return not self.file or (self.file.exists() and self.file.stat().st_size == size)

    def shards(self, job):
        """Returns the numbers of the records in each shard of a job, by the shard's name."""
        size, count = job[1], -(-len(ALL) // job[1])
        names = [f"rows-{number:05}-of-{count:05}" for number in range(count)]
        return {name: ALL & {*range(k * size, (k + 1) * size)} for k, name in enumerate(names)}

    def sealed(self, job):
        """The names of its finished shards."""
        found = {str(path) for path in self.folder.glob("rows-*")}
        names = [f"{self.folder}/{name}" for name in self.shards(job)]
        return [one for one in names if {f"{one}.jsonl", f"{one}.manifest.json"} <= found]

    def part_rows(self):
        """The shard, the header, and the complete records of each part file."""
        for path in self.folder.glob("parts/*.part"):
            header, *entries = path.read_bytes().split(b"\n")[:-1] or [b""]
            rows = set()
            with contextlib.suppress(ValueError, KeyError, TypeError):  # what follows is not read
                for entry in entries:
                    found = json.loads(entry)
                    if not isinstance(found["row"], int) or found["result"] is None:
                        break
                    rows.add(found["row"])
            yield path.name.partition(".")[0], header, rows

    def finished(self, job):
        """The records of finished shards."""
        if self.file and self.is_done(job):
            return {*ALL}
        return set().union(*(self.shards(job)[Path(file).name] for file in self.sealed(job)))

    def kept(self, job):
        """The records that are not to be decoded again."""
        if self.owner() != job or (self.output, job) not in HEADERS:
            return set()
        kept = self.finished(job)
        for name, header, rows in self.part_rows():
            if header.startswith(HEADERS[self.output, job]):
                kept |= self.shards(job).get(name, set()) & rows
        return kept

    def holds_records(self):
        sealed = any(self.folder.glob("rows-*.manifest.json"))
        return sealed or any(rows for *_, rows in self.part_rows())

    def refuses(self, job):
        """Whether folder or file are another job's, or somebody's."""
        is_begun = self.owner() is not None and not (self.folder / "stats.json").exists()
        is_there = self.file is not None and self.file.exists()
        return self.owner() != job and (is_begun or is_there or self.holds_records())

    # --- events -------------------------------------------------------------------------------

    def happen(self, event):
        """Lets an event happen, and checks what is always so."""
        getattr(self, type(event).__name__.lower())(event)
        if self.file and self.file.exists():
            whole = [WHOLE[self.output, job][self.output] for job in JOBS]
            assert self.file.read_bytes() in whole, "never in part"
        if owner := self.owner():
            for name in self.sealed(owner) if not self.file else ():
                path = f"{name}.jsonl"
                assert Path(path).read_bytes() == WHOLE[self.output, owner][path]

    def remove(self, event):
        named = {"file": [Path(self.output)], "folder": [self.folder]}
        for path in named.get(event.name) or sorted(self.folder.glob(event.name))[:1]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def tail(self, event):
        for path in [*self.folder.glob("parts/*.part")]:
            content = path.read_bytes()
            rows = (content[: max(len(content) - event.cut, 0)] + event.garbage).splitlines(True)
            if event.split:
                other = path.with_name(f"{path.name.partition('.')[0]}.{self.new_name()}.part")
                other.write_bytes(b"".join(rows[:1] + rows[2::2]))
                rows = rows[:1] + rows[1::2]
            path.write_bytes(b"".join(rows))

    def run(self, run):
        process = self.process(run)
        status, printed = self.end_of(process)
        self.operations = max(self.operations, process.operations[""])
        early = {ENDS[run.what]} if process.happened and run.what in ENDS else set()
        if process.killed:
            early = {ENDS["kill"]}
        if process.refused:
            assert status in {2} | early
            # One that ended early may not have removed its copy of a pipe.
            spared = "/spooled-" if run.pipe and process.happened else "nothing"
            assert without(spared, self.files()) == without(spared, process.before)
        elif process.taken is not None:
            assert status in ({0, 2} if process.disturbed else {2}), printed
            assert without("/parts/", self.files()) == without("/parts/", process.taken)
        elif process.disturbed:
            assert status in {0, 2, STORAGE_FAILED}
        else:
            self.judge(process, status, printed, early)

    def judge(self, process, status, printed, early):
        """Checks a process whose job owned the folder until the process ended."""
        run, job, kept = process.run, process.job, self.kept(process.job)
        assert status in {0} | early, printed
        assert process.kept | process.added <= kept, "nothing is lost"
        if process.under_way is not None:
            assert process.prepared == process.under_way, "no prompt is begun after SIGTERM"
            assert {*process.prepared} <= kept or run.grace == 0
        if self.processes:  # these may have been at some of its shards
            others = [other for other in self.processes if other.job == job and other.parts]
            assert not others or self.owner() == job
            return
        index, count = run.host
        if status in (130, 143) and process.claimed and not self.is_done(job):
            goes_on = f"records are kept in {self.folder}; the same command continues from there"
            assert f"{len(kept)} of {len(ALL)} {goes_on}" in printed
            if not self.holds_records() and not any(self.folder.glob("s*")):
                assert (self.owner() is None) == (count == 1), "alone, it lets others begin"
        if status != 0:
            return
        shards = enumerate(self.shards(job).values())
        share = set().union(*(rows for number, rows in shards if number % count == index))
        assert share <= self.finished(job)
        if self.finished(job) == ALL:
            assert self.files() == WHOLE[self.output, job]
        if process.was_done and not run.what:
            assert printed.endswith(f"{self.output} is already complete, with {len(ALL)} records\n")
            assert not process.prepared
        elif not run.what:
            assert {*process.prepared} == share - process.kept
            number = len(process.kept)
            resuming = f"resuming: {number} of {len(ALL)} records are kept in {self.folder}"
            assert (resuming in printed) == (number > 0)
            assert count > 1 or (f"({number} from earlier runs" in printed) == (number > 0)


def without(part, files):
    return {name: text for name, text in files.items() if part not in name}


def story(llm, output, events):
    """Lets events happen one after the other, then ends the job that they leave; returns the
    number of operations of the longest process."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(output, llm, patch)
        for event in events:
            world.happen(event)
        seed, size = world.owner() or (0, 3)
        world.happen(Run(seed=seed, size=size, overwrite=True))
        whole = world.files()
        assert whole == WHOLE[output, (seed, size)]
        world.happen(Run(seed=seed, size=None, overwrite=True, pipe=True))
        assert world.files() == whole
    return world.operations


def taken(what="", at=0):
    return Run(what, at, seed=1, overwrite=True)


def then(k):
    """What may come after a job was stopped, in turn."""
    ways = [
        [Run(batch=1), Run(seed=1)],
        [Run(seed=1), Run(host=(1, 2)), Run(host=(0, 2), batch=4)],
        [Run("kill", 9 + k // 6)],
        [Tail(cut=1 + 13 * k)],
        [Run("Ctrl-C", 25, pipe=True), Run(size=4, pipe=True)],
        [Remove(FILES[k // 6 % 5]), Run(seed=1)],
    ]
    return ways[k % 6]


FILES = ["rows-*.jsonl", "rows-*.manifest.json", "job.json", "stats.json", "file", "folder"]
WAYS = {
    "killed": lambda at, k: [Run("kill", at), *then(k)],
    "with another tail": lambda at, k: [
        *(Run("kill", 20 + at // 2), Tail(k % 4 * 7, GARBAGE[k % 9], k % 3 == 0)),
        *(Run("kill", 9 + k // 2), Run(seed=1)),
    ],
    "SIGTERM": lambda at, k: [Run("SIGTERM", at, grace=k % 2 * 20.0), *then(k + 1)],
    "Ctrl-C": lambda at, k: [Run("Ctrl-C", at, host=(0, 1 + k % 2)), *then(k + 2)],
    "full disk": lambda at, k: [Run("full disk", at), *then(k + 3)],
    "taken": lambda at, k: [Run((taken(),), at)],
    "taken by one that is killed": lambda at, k: [Run((taken("kill", 6 + at),), at)],
    "taken when it makes a folder": lambda at, k: [
        Run((taken(*("kill", 14) if k % 2 else ()),), k // 3, of="mkdir")
    ],
    "takes and is killed": lambda at, k: [Run("kill", 40), taken("kill", at), *then(k)[:1]],
    "in company": lambda at, k: [Run((Run(pipe=k % 2 > 0),), at)],
    "of two hosts": lambda at, k: [Run((Run(host=(1, 2)),), at, host=(0, 2))],
    "in the company of one that is killed": lambda at, k: [Run((Run("kill", at // 2 + 8),), at)],
    "beside one that is refused": lambda at, k: [Run((Run(seed=1, pipe=k % 2 > 0),), at)],
    "in the company of one that is stopped": lambda at, k: [
        Run((Run("Ctrl-C", at),), of="_append")
    ],
    "with a part removed": lambda at, k: [Run((Remove(FILES[k // 3 % 6]),), at)],
    "with a part removed when it is done": lambda at, k: [
        *(Run(), Remove(FILES[k // 3 % 6]), Run(seed=k // 18)),
    ],
}
MOST_OPERATIONS = 96


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
@pytest.mark.parametrize("way", WAYS)
def test_at_any_operation(llm, way, first):
    operations = 0
    for k, at in enumerate(range(first, MOST_OPERATIONS, 3)):
        operations = max(operations, story(llm, OUTPUTS[k % 3], WAYS[way](at, k)))
    assert operations <= MOST_OPERATIONS


def runs(what):
    return st.builds(
        Run,
        what,
        at=st.integers(0, 90),
        seed=st.sampled_from([0, 0, 1]),
        size=st.sampled_from([3, 3, 4]),
        overwrite=st.sampled_from([False, False, True]),
        host=st.sampled_from([(0, 1), (0, 1), (0, 2), (1, 2)]),
        pipe=st.booleans(),
        batch=st.integers(1, 4),
        grace=st.sampled_from([0.0, 20.0]),
    ).map(lambda run: run._replace(pipe=run.pipe and run.host == (0, 1)))


REMOVES = st.builds(Remove, st.sampled_from([name for name in FILES if name != "job.json"]))
"""Without job.json shards are nobody's; whoever takes them should not be killed before it has
removed them."""
SINGLE = runs(st.sampled_from(["", *ENDS]))
BESIDE = runs(st.lists(SINGLE | REMOVES, min_size=1, max_size=2).map(tuple))
TAILS = st.builds(Tail, st.integers(0, 400), st.sampled_from(GARBAGE), st.booleans())
EVENTS = SINGLE | BESIDE | REMOVES | TAILS


@settings(max_examples=8 * settings.default.max_examples)
@given(output=st.sampled_from(OUTPUTS), events=st.lists(EVENTS, min_size=2, max_size=6))
def test_whatever_happens(llm, output, events):
    story(llm, output, events)
