//! Work is done once, right, by whom it should be, and in spite of those that fail.

use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex, mpsc};

use base::random::Random;

use super::*;
use crate::coding::{Code, Kind};
use crate::crush::{Algorithm, Map, Options, Placer, Rule, Step, Tunables, Workspace, make_bucket};
use crate::engine::Choice;

/// An accelerator that does what it should, fails, or waits at a gate.
struct Odd {
    name: &'static str,
    expected: (u64, u64),
    fails: AtomicBool,
    asked: AtomicU64,
    shut: Mutex<bool>,
    opened: Condvar,
    patience: Duration,
    lanes: usize,
}

impl Odd {
    fn new(name: &'static str, expected: (u64, u64)) -> Arc<Self> {
        Self::of(name, expected, Duration::from_secs(60), 1)
    }

    fn of(name: &'static str, expected: (u64, u64), patience: Duration, lanes: usize) -> Arc<Self> {
        Arc::new(Self {
            patience,
            lanes,
            name,
            expected,
            fails: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            shut: Mutex::new(false),
            opened: Condvar::new(),
        })
    }

    fn shut(&self, shut: bool) {
        *self.shut.lock().unwrap() = shut;
        self.opened.notify_all();
    }
}

impl Accelerator for Odd {
    fn name(&self) -> &str {
        self.name
    }

    fn can(&self, work: &Work) -> bool {
        !matches!(work, Work::Place { .. })
    }

    fn run(&self, work: &mut Work) -> Result<(), String> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut shut = self.shut.lock().unwrap();
        while *shut {
            shut = self.opened.wait(shut).unwrap();
        }
        if self.fails.load(Ordering::SeqCst) {
            // What it leaves in the outputs is nobody's.
            if let Work::Encode { stripes, .. } = work {
                stripes
                    .iter_mut()
                    .flat_map(|s| &mut s.outputs)
                    .for_each(|output| output.fill(0xee));
            }
            return Err("a wire came off".into());
        }
        work.carry_out(engine::best())
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn lanes(&self) -> usize {
        self.lanes
    }

    fn expected(&self) -> (u64, u64) {
        self.expected
    }
}

/// One that says it is the processor.
struct Processor(Arc<Odd>);

impl Accelerator for Processor {
    fn name(&self) -> &str {
        self.0.name
    }

    fn can(&self, work: &Work) -> bool {
        self.0.can(work)
    }

    fn run(&self, work: &mut Work) -> Result<(), String> {
        self.0.run(work)
    }

    fn is_cpu(&self) -> bool {
        true
    }

    fn expected(&self) -> (u64, u64) {
        self.0.expected
    }
}

fn code() -> Arc<Code> {
    Arc::new(Code::new(Kind::Cauchy, 4, 2).unwrap())
}

fn stripe(random: &mut Random, chunk: usize) -> Buffers {
    let mut input = vec![0; 4 * chunk];
    random.fill(&mut input);
    let input = Arc::new(input);
    let inputs = (0..4).map(|i| Piece::new(&input, i * chunk..(i + 1) * chunk)).collect();
    Buffers { inputs, outputs: vec![vec![0; chunk]; 2] }
}

fn parity(code: &Code, stripe: &Buffers) -> Vec<Vec<u8>> {
    let mut parity = vec![vec![0; stripe.inputs[0].len()]; 2];
    let data: Vec<&[u8]> = stripe.inputs.iter().map(|input| &**input).collect();
    let mut out: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode(&data, &mut out).unwrap();
    parity
}

fn is_right(code: &Code, work: &Work) -> bool {
    let Work::Encode { stripes, .. } = work else { return false };
    stripes.iter().all(|stripe| stripe.outputs == parity(code, stripe))
}

/// Of who has done it.
fn name(dispatcher: &Dispatcher, result: Result<usize, Failure>) -> String {
    dispatcher.accounts()[result.unwrap()].name.to_string()
}

type Ended = (Work, Result<usize, Failure>);

fn submit(dispatcher: &Dispatcher, work: Work, to: &mpsc::Sender<Ended>) {
    let to = to.clone();
    dispatcher.submit(work, move |work, result| drop(to.send((work, result))));
}

#[test]
fn whatever_is_submitted_is_done_once_and_right() {
    let dispatcher = Dispatcher::default();
    dispatcher.add(Odd::new("far", (30_000, 0)));
    let (code, mut random) = (code(), Random::new(1));
    let (to, from) = mpsc::channel();
    for _ in 0..200 {
        let count = 1 + random.below(4);
        let most = 1 << (4 + random.below(13));
        let chunk = 1 + random.below(most) as usize;
        let stripes = (0..count).map(|_| stripe(&mut random, chunk)).collect();
        submit(&dispatcher, Work::Encode { code: Arc::clone(&code), stripes }, &to);
    }
    for _ in 0..200 {
        let (work, result) = from.recv().unwrap();
        assert!(is_right(&code, &work), "{result:?}");
        result.unwrap();
    }
    assert_eq!(dispatcher.accounts().iter().map(|account| account.done).sum::<u64>(), 200);

    // Chunks that were lost, from a stripe that was encoded.
    let whole = stripe(&mut random, 5000);
    let chunks: Vec<Piece> = whole
        .inputs
        .iter()
        .cloned()
        .chain(parity(&code, &whole).into_iter().map(Piece::from))
        .collect();
    let plan = Arc::new(code.plan(&[1, 4]).unwrap());
    let inputs = plan.sources().iter().map(|i| chunks[*i].clone()).collect();
    let stripes = vec![Buffers { inputs, outputs: vec![vec![0; 5000]; 2] }];
    let (work, result) = dispatcher.run(Work::Rebuild { plan, stripes });
    result.unwrap();
    let Work::Rebuild { stripes, .. } = work else { panic!("other work came back") };
    assert!(stripes[0].outputs == [chunks[1].to_vec(), chunks[4].to_vec()]);
}

#[test]
fn placements_are_those_of_one_after_the_other() {
    let mut map = Map::new(Tunables::DEFAULT);
    let (items, weights) = ((0..20).collect(), vec![0x10000; 20]);
    let root = make_bucket(Algorithm::Straw2, 1, items, weights, 1).unwrap();
    let root = map.add_bucket(root).unwrap();
    let steps = vec![Step::Take(root), Step::ChooseFirstn(3, 0), Step::Emit];
    map.rules.push(Some(Rule { ruleset: 0, kind: 1, min_size: 1, max_size: 9, steps }));
    let placer = Arc::new(Placer::new(&map, &Options::default()).unwrap());
    let reweights = Arc::new(vec![0x10000; 20]);
    let inputs: Vec<u32> = (0..500).collect();
    let work = Work::Place {
        placer: Arc::clone(&placer),
        rule: 0,
        inputs: inputs.clone(),
        width: 3,
        reweights: Arc::clone(&reweights),
        batch: None,
    };
    let (work, result) = Dispatcher::default().run(work);
    result.unwrap();
    let Work::Place { batch: Some(batch), .. } = work else { panic!("nothing was placed") };
    let mut workspace = Workspace::default();
    let direct = placer.place_many(0, &inputs, 3, &reweights, &mut workspace).unwrap();
    assert!(inputs.iter().enumerate().all(|(i, _)| batch.get(i) == direct.get(i)));
}

#[test]
fn who_fails_is_stood_in_for() {
    let dispatcher = Dispatcher::new();
    let odd = Odd::new("odd", (0, 0));
    odd.fails.store(true, Ordering::SeqCst);
    dispatcher.add(Arc::clone(&odd));
    let (code, mut random) = (code(), Random::new(2));
    let mut encode = |chunk| {
        let stripes = vec![stripe(&mut random, chunk)];
        Work::Encode { code: Arc::clone(&code), stripes }
    };
    let (_, result) = dispatcher.run(encode(512));
    assert_eq!(result, Err(Failure::Failed("odd: a wire came off".into())));
    dispatcher.add(Cpu(engine::best()));
    for _ in 0..1000 {
        let (work, result) = dispatcher.run(encode(512));
        assert_eq!(name(&dispatcher, result), engine::best().name());
        assert!(is_right(&code, &work));
    }
    // It is not tried every time.
    assert!(odd.asked.load(Ordering::SeqCst) < 1000);
    // And when it can again, it does, for work that it is the better one for.
    odd.fails.store(false, Ordering::SeqCst);
    let back = (0..10_000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        name(&dispatcher, dispatcher.run(encode(256 << 10)).1) == "odd"
    });
    assert!(back);
    assert!(!dispatcher.accounts()[0].aside);
}

#[test]
fn size_and_load_decide() {
    let dispatcher = Dispatcher::default();
    // As long for anything.
    let far = Odd::new("far", (200_000, 0));
    dispatcher.add(Arc::clone(&far));
    let (code, mut random) = (code(), Random::new(3));
    let mut encode = |chunk| {
        let stripes = vec![stripe(&mut random, chunk)];
        Work::Encode { code: Arc::clone(&code), stripes }
    };
    let small = |name: &str| Choice::ENGINES.iter().any(|choice| choice.name() == name);
    assert!(small(&name(&dispatcher, dispatcher.run(encode(4096)).1)));
    // What takes the CPU longer than that goes there, as long as it has nothing else to do.
    let large = 8 << 20;
    far.shut(true);
    let (to, from) = mpsc::channel();
    submit(&dispatcher, encode(large), &to);
    let begun = (0..10_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        far.asked.load(Ordering::SeqCst) > 0
    });
    assert!(begun, "{dispatcher:?}");
    for _ in 0..20 {
        submit(&dispatcher, encode(large / 8), &to);
    }
    assert!(small(&name(&dispatcher, dispatcher.run(encode(4096)).1)));
    // Others do what it does not come to, in the threads of the CPU's own queue.
    let (work, result) = from.recv().unwrap();
    assert!(small(&name(&dispatcher, result)));
    assert!(is_right(&code, &work));
    far.shut(false);
    for _ in 0..20 {
        let (work, result) = from.recv().unwrap();
        result.unwrap();
        assert!(is_right(&code, &work));
    }
    assert!(dispatcher.accounts().iter().any(|a| &*a.name == "far" && a.done >= 1));
}

#[test]
fn what_cannot_be_done_is_given_back() {
    let dispatcher = Dispatcher::new();
    let (code, mut random) = (code(), Random::new(4));
    let right = stripe(&mut random, 100);
    let one = |stripe: Buffers| Work::Encode { code: Arc::clone(&code), stripes: vec![stripe] };
    let (work, result) = dispatcher.run(one(right.clone()));
    assert_eq!(result, Err(Failure::Nobody));
    assert!(matches!(work, Work::Encode { stripes, .. } if stripes[0].outputs == right.outputs));
    for wrong in [
        Buffers { outputs: Vec::new(), ..right.clone() },
        Buffers { outputs: vec![vec![0; 100], vec![0; 99]], ..right.clone() },
        Buffers { inputs: right.inputs[..3].into(), ..right.clone() },
        Buffers { inputs: vec![Piece::default(); 4].into(), outputs: vec![Vec::new(); 2] },
        Buffers {
            inputs: [&right.inputs[..3], &[vec![0; 101].into()]].concat().into(),
            ..right.clone()
        },
    ] {
        let (_, result) = Dispatcher::default().run(one(wrong));
        assert!(matches!(result, Err(Failure::Shape(_))), "{result:?}");
    }
    // One that takes no more: it is said, not waited for.
    let far = Odd::new("far", (1, 0));
    far.shut(true);
    dispatcher.add(Arc::clone(&far));
    let (to, from) = mpsc::channel();
    for _ in 0..QUEUE_MAX + 10 {
        submit(&dispatcher, one(right.clone()), &to);
    }
    assert_eq!(from.recv().unwrap().1, Err(Failure::Busy));
    far.shut(false);
    // Letting go of it loses nothing.
    drop(dispatcher);
    drop(to);
    let rest: Vec<Ended> = from.iter().collect();
    let done = rest.iter().filter(|(work, result)| result.is_ok() && is_right(&code, work)).count();
    assert_eq!(rest.len(), QUEUE_MAX + 9);
    assert!(done >= QUEUE_MAX);
}

/// One that hangs keeps nobody waiting: another does its task and all that wait behind it, and what it writes when it comes back goes
/// nowhere; meanwhile it is given nothing, and afterwards it is used again.
#[test]
fn who_hangs_is_stood_in_for() {
    for (lanes, fails) in [(1, false), (1, true), (3, true), (3, false)] {
        let dispatcher = Dispatcher::default();
        let odd = Odd::of("odd", (0, 0), Duration::from_millis(30), lanes);
        dispatcher.add(Arc::clone(&odd));
        odd.shut(true);
        odd.fails.store(fails, Ordering::SeqCst);
        let (code, mut random) = (code(), Random::new(6));
        // So much that the CPU would not do it at once.
        let mut encode = |chunk| {
            let stripes = vec![stripe(&mut random, chunk)];
            Work::Encode { code: Arc::clone(&code), stripes }
        };
        let (to, from) = mpsc::channel();
        for _ in 0..20 {
            submit(&dispatcher, encode(1 << 20), &to);
        }
        let mut all = Vec::new();
        for _ in 0..20 {
            let (work, result) = from.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_ne!(name(&dispatcher, result), "odd");
            all.push(work);
        }
        // Also who waits for it, and finds nobody else who is free.
        let (work, result) = dispatcher.run(encode(1 << 20));
        assert_ne!(name(&dispatcher, result), "odd");
        all.push(work);
        let account = || dispatcher.accounts().pop().unwrap();
        let kept = account().stuck as u64;
        assert!((1..=lanes as u64).contains(&kept), "{dispatcher:?}");
        assert_eq!((account().done, account().late), (0, 0));
        // It comes back, and writes what it likes.
        odd.shut(false);
        let back = (0..10_000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            account().late == kept
        });
        assert!(back && account().stuck == 0, "{dispatcher:?}");
        assert!(all.iter().all(|work| is_right(&code, work)));
        assert!(from.try_recv().is_err(), "a task has ended twice");
        odd.fails.store(false, Ordering::SeqCst);
        let again = (0..10_000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            submit(&dispatcher, encode(1 << 20), &to);
            let (work, result) = from.recv().unwrap();
            assert!(is_right(&code, &work));
            name(&dispatcher, result) == "odd"
        });
        assert!(again, "{dispatcher:?}");
    }
}

/// Who looks after those that may hang has ended, and one is given a task all the same, by what another had still and failed at: it is looked
/// after again.
#[test]
fn who_is_asked_last_is_looked_after() {
    let dispatcher = Dispatcher::new();
    let far = Odd::of("far", (2_000_000, 0), Duration::from_millis(30), 1);
    let (code, mut random) = (code(), Random::new(9));
    let mut encode = || {
        let stripes = vec![stripe(&mut random, 1 << 20)];
        Work::Encode { code: Arc::clone(&code), stripes }
    };
    dispatcher.add(Arc::clone(&far));
    assert_eq!(name(&dispatcher, dispatcher.run(encode()).1), "far");
    // As a processor it is not looked after; and it is thought to be the faster one, but not so fast that it is done at once.
    let near = Odd::new("near", (1_000_000, 0));
    far.shut(true);
    near.shut(true);
    near.fails.store(true, Ordering::SeqCst);
    dispatcher.add(Processor(Arc::clone(&near)));
    let (to, from) = mpsc::channel();
    submit(&dispatcher, encode(), &to);
    let inner = Arc::clone(&dispatcher.inner);
    drop(dispatcher);
    // The thread of the queue of who is near is left.
    let ended = (0..10_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        Arc::strong_count(&inner) == 2
    });
    assert!(ended && near.asked.load(Ordering::SeqCst) == 1);
    near.shut(false);
    let (_, result) = from.recv_timeout(Duration::from_secs(60)).unwrap();
    let said = "far: it has not come back in time";
    assert_eq!(result, Err(Failure::Failed(said.into())));
    far.shut(false);
}

/// Where nobody can stand in, that is said, and not waited for.
#[test]
fn alone_and_hanging_is_a_failure() {
    let dispatcher = Dispatcher::new();
    let odd = Odd::of("odd", (0, 0), Duration::from_millis(30), 1);
    dispatcher.add(Arc::clone(&odd));
    odd.shut(true);
    let (code, mut random) = (code(), Random::new(8));
    let mut encode = || {
        let stripes = vec![stripe(&mut random, 100)];
        Work::Encode { code: Arc::clone(&code), stripes }
    };
    let (work, result) = dispatcher.run(encode());
    let said = "odd: it has not come back in time";
    assert_eq!(result, Err(Failure::Failed(said.into())));
    // The buffers are not those that it has.
    assert!(matches!(work, Work::Encode { stripes, .. } if stripes[0].outputs.len() == 2));
    assert_eq!(dispatcher.run(encode()).1, Err(Failure::Busy));
    odd.shut(false);
}

/// A task moves through several hands: it is small.
#[test]
fn a_task_is_small() {
    assert!(size_of::<Work>() <= 64, "{}", size_of::<Work>());
}
