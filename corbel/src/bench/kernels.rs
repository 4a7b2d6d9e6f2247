//! `corbel bench kernels`: the placement and coding kernels on one core, each figure a ratio or a
//! share measured in one run, so that the machine's own speed drops out.
//!
//! - `straw2_ratio`: placements a second over Ceph's own tools ([`super::straw2`]).
//! - `rs_encode_ratio`, `rs_decode_ratio`: our speed over ISA-L's, the worst over k = 6, 8, 10, 12,
//!   m = 4, chunks of 4 KiB to 1 MiB; decoding rebuilds four lost data chunks, measured with the
//!   matrix prepared and with its inversion included.
//! - `rs_jerasure_ratio`: the same against Jerasure's `reed_sol_van`.
//! - `dispatch_overhead`: what it takes longer to encode stripes of k = 8, m = 4 as tasks of [`placement::dispatch`] than by
//!   calls, by the median of turns; the worst of stripes of 64 KiB and of chunks of 64 KiB, each alone as a pool asks for
//!   them (`run`), alone by an event (`submit`), and 16 to a task through a queue, four tasks at a time.
//! - `crc32c_share`: time for CRC32C of 4 KiB over the time to copy 4 KiB from cold memory.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use placement::coding::{Code, Kind};
use placement::dispatch::{Accelerator, Buffers, Cpu, Dispatcher, Piece, Work};
use placement::engine::{self, Choice, Engine};
use placement::foreign::{Isal, Jerasure, Missing};
use serde_json::{Value, json};

use super::Figures;
use super::race::{race, ratio};
use super::straw2;
use crate::failure::{Failure, Kind as FailureKind, Result};

/// Data chunks measured.
const DATA_CHUNKS: [usize; 4] = [6, 8, 10, 12];
/// Parity chunks, and chunks lost.
const PARITY_CHUNKS: usize = 4;
/// Chunk sizes measured.
const CHUNK_BYTES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Block whose checksum is compared with copying it.
const BLOCK_BYTES: usize = 4096;
/// Far above the last-level cache, so that a block read from it comes from memory.
const COLD_BYTES: usize = 256 << 20;
/// Turns of each contender; the best counts. Many and short, since other work comes in bursts.
const ROUNDS: usize = 40;
const TURN: Duration = Duration::from_micros(1500);
/// The same for what differs by a few hundredths: most turns are to lie between two of another program's.
const SHORT_ROUNDS: usize = 400;
const SHORT_TURN: Duration = Duration::from_micros(200);

/// What to measure.
#[derive(Args, Debug, Default, Clone)]
pub struct Options {
    /// Engine: auto, portable, ssse3, avx2, avx512, gfni
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub engine: Choice,
}

/// What the sections share.
struct Run {
    json: bool,
    choice: Choice,
    engine: &'static dyn Engine,
}

/// The parts of the bench: each prints its rows and gives its figures. A further kernel is a row.
const SECTIONS: [fn(&Run) -> Figures; 5] = [crush, reed_solomon, dispatch, crc32c, lz4];

/// Runs every section. Rows are printed as they come: text, or one JSON object a line.
pub fn run(json: bool, options: &Options) -> Result<Figures> {
    let engine = engine::select(options.engine)
        .map_err(|e| Failure::new(FailureKind::Environment, e.to_string(), "use --engine auto"))?;
    let run = Run { json, choice: options.engine, engine };
    let mut figures = Figures::new();
    figures.insert("engine".into(), engine.name().into());
    for section in SECTIONS {
        figures.append(&mut section(&run));
    }
    Ok(figures)
}

impl Run {
    fn row(&self, row: &Value, text: impl FnOnce() -> String) {
        if self.json {
            println!("{row}");
        } else {
            println!("{}", text());
        }
    }

    /// The library, or a note that it is left out.
    fn library<T>(&self, found: std::result::Result<T, Missing>) -> Option<T> {
        found.inspect_err(|e| self.row(&json!({"left_out": e.to_string()}), || e.to_string())).ok()
    }
}

/// Chunks side by side on cache-line boundaries, filled with something.
struct Chunks {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Chunks {
    fn new(count: usize, len: usize) -> Self {
        let mut bytes = vec![0u8; count * len + 4096];
        base::random::Random::new(len as u64).fill(&mut bytes);
        let start = bytes.as_ptr().align_offset(4096).min(4096);
        Self { bytes, start, len }
    }

    /// The first `at` chunks to read and the rest to write.
    fn split(&mut self, at: usize, count: usize) -> (Vec<&[u8]>, Vec<&mut [u8]>) {
        let (a, b) = self.bytes[self.start..][..count * self.len].split_at_mut(at * self.len);
        (a.chunks(self.len).collect(), b.chunks_mut(self.len).collect())
    }
}

/// Gigabytes of data a second.
fn rate(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}

fn round(x: f64) -> Value {
    if x.is_finite() { ((x * 1000.0).round() / 1000.0).into() } else { Value::Null }
}

/// Placements a second, 3 replicas, 1,000 straw2 devices in three levels, over Ceph's.
fn crush(run: &Run) -> Figures {
    let speeds =
        straw2::measure(run.choice, |note| run.row(&json!({"left_out": note}), || note.to_owned()));
    for speed in &speeds {
        let (json, text) = speed.row();
        run.row(&json, || text);
    }
    let ratio = speeds.iter().find(|s| s.kind == "straw2").and_then(straw2::Speed::ratio);
    [("straw2_ratio".to_owned(), round(ratio.unwrap_or(f64::NAN)))].into_iter().collect()
}

fn reed_solomon(run: &Run) -> Figures {
    let isal = run.library(Isal::load());
    let jerasure = run.library(Jerasure::load());
    let mut worst = [f64::INFINITY; 3];
    for k in DATA_CHUNKS {
        for len in CHUNK_BYTES {
            let encode = isal.map_or(f64::INFINITY, |isal| race_encode(run, &isal, k, len));
            let decode = isal.map_or(f64::INFINITY, |isal| race_decode(run, &isal, k, len));
            let other = jerasure.map_or(f64::INFINITY, |j| race_jerasure(run, &j, k, len));
            for (w, ratio) in worst.iter_mut().zip([encode, decode, other]) {
                *w = w.min(ratio);
            }
        }
    }
    let names = ["rs_encode_ratio", "rs_decode_ratio", "rs_jerasure_ratio"];
    names.into_iter().map(String::from).zip(worst.map(round)).collect()
}

fn report(run: &Run, what: &str, rival: &str, k: usize, len: usize, times: [f64; 2]) -> f64 {
    let (ours, theirs) = (rate(k * len, times[0]), rate(k * len, times[1]));
    let ratio = ours / theirs;
    let row = json!({"row": what, "k": k, "m": PARITY_CHUNKS, "chunk": len, "gb_s": round(ours),
        rival: round(theirs), "ratio": round(ratio)});
    run.row(&row, || {
        format!(
            "{what:<16} k {k:>2} m {PARITY_CHUNKS} {:>5} KiB {ours:>7.2} GB/s  {rival} {theirs:>6.2} GB/s  ratio {ratio:>6.2}",
            len / 1024
        )
    });
    ratio
}

fn code(run: &Run, kind: Kind, k: usize) -> Code {
    Code::with_engine(kind, k, PARITY_CHUNKS, run.engine).expect("a shape within bounds")
}

fn race_encode(run: &Run, isal: &Isal, k: usize, len: usize) -> f64 {
    let code = code(run, Kind::Cauchy, k);
    let tables = isal.tables(k, PARITY_CHUNKS, code.matrix());
    let mut chunks = Chunks::new(k + 2 * PARITY_CHUNKS, len);
    let (data, mut parity) = chunks.split(k, k + 2 * PARITY_CHUNKS);
    let (ours, theirs) = parity.split_at_mut(PARITY_CHUNKS);
    let times = race(
        ROUNDS,
        TURN,
        [&mut || code.encode(black_box(&data), black_box(ours)).expect("shapes fit"), &mut || {
            isal.encode(&tables, black_box(&data), black_box(theirs))
        }],
    );
    assert!(ours == theirs, "parity differs from ISA-L's: k {k}, {len} bytes");
    report(run, "encode", "isal_gb_s", k, len, times)
}

/// Four data chunks lost, the worst case: every target needs every source.
fn race_decode(run: &Run, isal: &Isal, k: usize, len: usize) -> f64 {
    let code = code(run, Kind::Cauchy, k);
    let lost: Vec<usize> = (0..PARITY_CHUNKS).collect();
    let plan = code.plan(&lost).expect("Cauchy decodes any loss");
    let rows = isal_rows(isal, &code, plan.sources(), &lost);
    let tables = isal.tables(k, PARITY_CHUNKS, &rows);
    let mut chunks = Chunks::new(k + 2 * PARITY_CHUNKS, len);
    let (sources, mut targets) = chunks.split(k, k + 2 * PARITY_CHUNKS);
    let (ours, theirs) = targets.split_at_mut(PARITY_CHUNKS);
    let kernel = race(
        ROUNDS,
        TURN,
        [
            &mut || plan.rebuild(black_box(&sources), black_box(ours)).expect("shapes fit"),
            &mut || isal.encode(&tables, black_box(&sources), black_box(theirs)),
        ],
    );
    assert!(ours == theirs, "rebuilt chunks differ from ISA-L's: k {k}, {len} bytes");
    let whole = race(
        ROUNDS,
        TURN,
        [
            &mut || {
                let plan = code.plan(black_box(&lost)).expect("Cauchy decodes any loss");
                plan.rebuild(&sources, black_box(ours)).expect("shapes fit");
            },
            &mut || {
                let rows = isal_rows(isal, &code, plan.sources(), black_box(&lost));
                let tables = isal.tables(k, PARITY_CHUNKS, &rows);
                isal.encode(&tables, &sources, black_box(theirs));
            },
        ],
    );
    let kernel = report(run, "decode", "isal_gb_s", k, len, kernel);
    kernel.min(report(run, "invert + decode", "isal_gb_s", k, len, whole))
}

/// ISA-L's recipe: the rows of the generator matrix that survive, inverted; the rows of the inverse
/// that belong to the lost data chunks.
fn isal_rows(isal: &Isal, code: &Code, sources: &[usize], lost: &[usize]) -> Vec<u8> {
    let k = code.data_chunks();
    let mut square = vec![0u8; k * k];
    for (row, &s) in square.chunks_mut(k).zip(sources) {
        match s.checked_sub(k) {
            None => row[s] = 1,
            Some(p) => row.copy_from_slice(&code.matrix()[p * k..][..k]),
        }
    }
    let inverse = isal.invert(&square, k).expect("Cauchy decodes any loss");
    lost.iter().flat_map(|&l| inverse[l * k..][..k].iter().copied()).collect()
}

fn race_jerasure(run: &Run, jerasure: &Jerasure, k: usize, len: usize) -> f64 {
    let code = code(run, Kind::JerasureVandermonde, k);
    let matrix = jerasure.matrix(k, PARITY_CHUNKS);
    let mut chunks = Chunks::new(k + 2 * PARITY_CHUNKS, len);
    let (data, mut parity) = chunks.split(k, k + 2 * PARITY_CHUNKS);
    let (ours, theirs) = parity.split_at_mut(PARITY_CHUNKS);
    let times = race(
        ROUNDS / 3,
        TURN,
        [&mut || code.encode(black_box(&data), black_box(ours)).expect("shapes fit"), &mut || {
            jerasure.encode(&matrix, black_box(&data), black_box(theirs))
        }],
    );
    assert!(ours == theirs, "parity differs from Jerasure's: k {k}, {len} bytes");
    report(run, "encode", "jerasure_gb_s", k, len, times)
}

/// Tasks before the engines, beside calls.
fn dispatch(run: &Run) -> Figures {
    let shapes = [("stripe", (64 << 10) / DISPATCH_K), ("chunk", 64 << 10)];
    let worst = shapes.into_iter().flat_map(|(of, chunk)| dispatch_of(run, of, chunk));
    let worst = worst.fold(f64::NEG_INFINITY, f64::max);
    [("dispatch_overhead".to_owned(), round(worst))].into_iter().collect()
}

/// Data chunks of the stripes that go through [`placement::dispatch`].
const DISPATCH_K: usize = 8;

/// What tasks with stripes of 64 KiB, or with chunks of as many, take longer than calls: by [`Dispatcher::run`], by
/// [`Dispatcher::submit`], and in batches through a queue.
fn dispatch_of(run: &Run, of: &str, chunk: usize) -> [f64; 3] {
    const K: usize = DISPATCH_K;
    const BATCH: usize = 16;
    const DEPTH: usize = 4;
    /// Bytes of data that go through the queue from when it is filled until it is empty again.
    const FLOW: usize = 256 << 20;
    let code = Arc::new(code(run, Kind::Cauchy, K));
    let mut random = base::random::Random::new(5);
    let mut stripe = || {
        let mut input = vec![0; K * chunk];
        random.fill(&mut input);
        let input = Arc::new(input);
        let inputs = (0..K).map(|i| Piece::new(&input, i * chunk..(i + 1) * chunk)).collect();
        Buffers { inputs, outputs: vec![vec![0; chunk]; PARITY_CHUNKS] }
    };
    let direct = |stripes: &mut [Buffers]| {
        for stripe in stripes {
            let inputs: [&[u8]; K] = std::array::from_fn(|i| &*stripe.inputs[i]);
            let outputs: &mut [Vec<u8>; PARITY_CHUNKS] =
                stripe.outputs.as_mut_slice().try_into().expect("so many were made");
            let mut outputs = outputs.each_mut().map(Vec::as_mut_slice);
            code.encode(black_box(&inputs), &mut outputs).expect("shapes fit");
        }
    };
    let work = |stripes| Work::Encode { code: Arc::clone(&code), stripes };
    let done = |work, is_ok| match (work, is_ok) {
        (Work::Encode { stripes, .. }, true) => stripes,
        other => panic!("a task failed: {other:?}"),
    };
    let dispatcher = Dispatcher::new();
    dispatcher.add(Cpu(run.engine));
    // The same buffers by turns: what is in the cache for one is there for the other.
    let one = std::cell::RefCell::new(vec![stripe()]);
    direct(&mut one.borrow_mut());
    let parity = one.borrow()[0].outputs.clone();
    let by_call = || direct(&mut one.borrow_mut());
    let by_run = || {
        let mut one = one.borrow_mut();
        let (work, result) = dispatcher.run(work(std::mem::take(&mut *one)));
        *one = done(work, result.is_ok());
    };
    let alone = |mut by_task: Box<dyn FnMut() + '_>| {
        one.borrow_mut()[0].outputs.iter_mut().for_each(|output| output.fill(0));
        by_task();
        assert!(one.borrow()[0].outputs == parity, "a task computes something else");
        let mut by_call = by_call;
        ratio(SHORT_ROUNDS, SHORT_TURN, [&mut by_call, &mut *by_task])
    };
    let event = Arc::new(Event { told: Mutex::default(), waits: std::thread::current() });
    let waits = alone(Box::new(by_run));
    let told = alone(Box::new(|| {
        let stripes = std::mem::take(&mut *one.borrow_mut());
        let to = Arc::clone(&event);
        let told = move |work, result: std::result::Result<_, _>| to.tell((work, result.is_ok()));
        dispatcher.submit(work(stripes), told);
        let (work, is_ok) = event.wait();
        *one.borrow_mut() = done(work, is_ok);
    }));
    let queued = Dispatcher::new();
    queued.add(Behind(Cpu(run.engine)));
    let tasks = FLOW / (BATCH * K * chunk);
    let (over, ended) = std::sync::mpsc::channel();
    let flow = Arc::new(Flow { queued, code: Arc::clone(&code), left: AtomicUsize::new(0), over });
    let mut sets: Vec<Vec<Buffers>> =
        (0..DEPTH).map(|_| (0..BATCH).map(|_| stripe()).collect()).collect();
    let sets = std::cell::RefCell::new(&mut sets);
    let flow = ratio(
        ROUNDS / 2,
        TURN,
        [
            &mut || {
                let mut sets = sets.borrow_mut();
                (0..tasks).for_each(|task| direct(&mut sets[task % DEPTH]));
            },
            &mut || {
                let mut sets = sets.borrow_mut();
                flow.left.store(tasks - DEPTH, Ordering::Relaxed);
                sets.drain(..).for_each(|set| flow.submit(set));
                sets.extend(
                    (0..DEPTH).map(|_| ended.recv().ok().flatten().expect("a task failed")),
                );
            },
        ],
    );
    let over = [waits, told, flow].map(|ratio| ratio - 1.0);
    let [waits, told, flow] = over;
    let row = json!({"row": "dispatch", "k": K, "m": PARITY_CHUNKS, "chunk": chunk, "run": round(waits),
        "submit": round(told), "queued": round(flow)});
    run.row(&row, || {
        format!(
            "dispatch         {of}s of 64 KiB: run {:>6.2} % more, submit {:>6.2} %, {BATCH} to a task through a queue {:>6.2} %",
            waits * 1e2,
            told * 1e2,
            flow * 1e2
        )
    });
    over
}

/// What a task tells the thread that has made this, which waits for it.
struct Event<T> {
    told: Mutex<Option<T>>,
    waits: std::thread::Thread,
}

impl<T> Event<T> {
    fn tell(&self, what: T) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
        self.waits.unpark();
    }

    fn wait(&self) -> T {
        loop {
            let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).take();
            match told {
                Some(told) => return told,
                None => std::thread::park(),
            }
        }
    }
}

/// Tasks through a queue: each is followed by another one with its buffers, submitted by the event that it has ended.
struct Flow {
    queued: Dispatcher,
    code: Arc<Code>,
    /// Tasks that are to be submitted yet.
    left: AtomicUsize,
    /// Buffers that nothing follows with; none: their task failed.
    over: std::sync::mpsc::Sender<Option<Vec<Buffers>>>,
}

impl Flow {
    fn submit(self: &Arc<Self>, stripes: Vec<Buffers>) {
        let work = Work::Encode { code: Arc::clone(&self.code), stripes };
        let flow = Arc::clone(self);
        self.queued.submit(work, move |work, result| {
            let Work::Encode { stripes, .. } = work else { unreachable!("it was one to encode") };
            let next = |left: usize| left.checked_sub(1);
            if result.is_ok()
                && flow.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
            {
                flow.submit(stripes);
            } else {
                let _ = flow.over.send(result.is_ok().then_some(stripes));
            }
        });
    }
}

/// An engine of the CPU that is always queued for, by one thread.
struct Behind(Cpu);

impl Accelerator for Behind {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn can(&self, work: &Work) -> bool {
        self.0.can(work)
    }

    fn run(&self, work: &mut Work) -> std::result::Result<(), String> {
        self.0.run(work)
    }

    /// A machine that does other things too may keep its thread waiting: nobody stands in for it here.
    fn patience(&self) -> Duration {
        Duration::from_secs(10)
    }

    fn expected(&self) -> (u64, u64) {
        self.0.expected()
    }
}

fn crc32c(run: &Run) -> Figures {
    let block = vec![0x5au8; BLOCK_BYTES];
    let [crc] = race(
        ROUNDS,
        TURN,
        [&mut || {
            black_box(run.engine.crc32c(0, black_box(&block)));
        }],
    );
    let copy = cold_copy();
    let row = json!({"row": "crc32c", "bytes": BLOCK_BYTES, "gb_s": round(rate(BLOCK_BYTES, crc)),
        "cold_copy_gb_s": round(rate(BLOCK_BYTES, copy))});
    run.row(&row, || {
        format!(
            "crc32c of 4 KiB  {:.1} ns ({:.1} GB/s); copying it from cold memory {:.1} ns ({:.1} GB/s)",
            crc * 1e9,
            rate(BLOCK_BYTES, crc),
            copy * 1e9,
            rate(BLOCK_BYTES, copy)
        )
    });
    [("crc32c_share".to_owned(), round(crc / copy))].into_iter().collect()
}

/// Seconds to copy one block from memory that no cache holds, blocks in random order; the best of
/// a few passes, each over blocks that the pass before it has pushed out.
fn cold_copy() -> f64 {
    let mut random = base::random::Random::new(1);
    let cold = vec![1u8; COLD_BYTES];
    let mut order: Vec<usize> = (0..COLD_BYTES / BLOCK_BYTES).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    let mut block = vec![0u8; BLOCK_BYTES];
    let mut best = f64::INFINITY;
    for _ in 0..12 {
        let start = Instant::now();
        for &i in &order {
            block.copy_from_slice(&cold[i * BLOCK_BYTES..][..BLOCK_BYTES]);
            black_box(&mut block);
        }
        best = best.min(start.elapsed().as_secs_f64() / order.len() as f64);
    }
    best
}

fn lz4(run: &Run) -> Figures {
    let len = 1 << 20;
    let mut noise = vec![0u8; len];
    base::random::Random::new(9).fill(&mut noise);
    // Half noise, half zeros, in turns of 64 bytes: shrinks by about half.
    let mut mixed = noise.clone();
    mixed.chunks_mut(128).for_each(|c| c[..64].fill(0));
    let mut packed = vec![0u8; placement::compress::bound(len)];
    let mut back = vec![0u8; len];
    let engine = run.engine;
    let n = engine.compress(&mixed, &mut packed).expect("the buffer is large enough");
    let block = packed[..n].to_vec();
    let times = race(
        ROUNDS / 3,
        TURN,
        [
            &mut || {
                engine
                    .compress(black_box(&mixed), &mut packed)
                    .expect("the buffer is large enough");
            },
            &mut || {
                engine.decompress(black_box(&block), &mut back).expect("our own block");
            },
            &mut || {
                black_box(placement::compress::looks_compressible(black_box(&noise)));
            },
        ],
    );
    let [pack, unpack] = [times[0], times[1]].map(|t| rate(len, t));
    let row = json!({"row": "lz4", "bytes": len, "packed": n, "compress_gb_s": round(pack),
        "decompress_gb_s": round(unpack), "probe_us": round(times[2] * 1e6)});
    run.row(&row, || {
        format!(
            "lz4 of 1 MiB     to {n} bytes: {pack:.2} GB/s, back {unpack:.2} GB/s; probe {:.2} us",
            times[2] * 1e6
        )
    });
    Figures::new()
}
