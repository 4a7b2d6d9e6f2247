//! The proof that the suite finds what it looks for: every broken variant of `base::planted` is switched on,
//! and histories (or crash states) are run until a judge objects. A history counts only if the same seed is
//! clean without the variant. Each variant has a process of its own, since many end it.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base::planted::{Bug, choose};
use frontend::fuse::kernel;
use service::packing::Compression;

use crate::crash::catch::{Budget, catch};
use crate::faults::Fault;
use crate::scenario::{Scenario, Script, When};
use crate::world::{MS, US};
use crate::{Flavour, Preset, run};

/// Histories of a variant begin with this seed, if no other is asked for, so that the list does not depend on what
/// else runs.
pub const FIRST_SEED: u64 = 1;
/// Numbers from here on are the cluster's variants.
const CLUSTER: u16 = 50;
/// Variants that the tests of others find, and where those are (each run by `scripts/soak.sh`): of work apart and of checksums at rest; of
/// who speaks, by real sockets and certificates; of devices; of callers that are interrupted while they wait for a sole use, and
/// of joint leases what only a client shows that breaks their rules; what others are shown that they must not see, what is packed and what
/// is left out of chunks; what is closed and opened again at once, which LibFS does not say in that order, or not between two looks
/// of the service here; how long somebody waits beside a flood, which is nobody's error; and what takes a moment that no seed has met.
pub const ELSEWHERE: &[(std::ops::Range<u16>, &str)] = &[
    (55..56, "service/tests/node/epochs.rs"),
    (528..530, "service/tests/node/past.rs"),
    (542..543, "service/tests/node/closing.rs"),
    (543..544, "service/tests/node/past.rs"),
    (530..531, "block/tests/layer.rs"),
    (531..532, "block/tests/pool.rs"),
    (532..535, "block/tests/paced.rs"),
    (535..536, "block/tests/layer.rs"),
    (536..538, "block/tests/pool.rs"),
    (545..546, "service/tests/node/ranges.rs"),
    (547..549, "service/tests/node/ranges.rs"),
    (550..554, "service/tests/node/ranges.rs"),
    (538..539, "block/tests/paced.rs"),
    (539..541, "block/tests/pool.rs"),
    (90..91, "service/tests/node/grants.rs"),
    (91..93, "service/tests/node/joins.rs"),
    (125..126, "service/tests/node/joins.rs"),
    (211..212, "service/tests/node/threads.rs"),
    (224..225, "service/tests/node/joint.rs"),
    (228..229, "service/tests/node/joint.rs"),
    (237..238, "service/tests/node/threads.rs"),
    (238..239, "service/tests/node/closed.rs"),
    (247..248, "service/tests/node/epochs.rs"),
    (251..252, "service/tests/node/turns.rs"),
    (252..256, "service/tests/node/crowds.rs"),
    (259..260, "service/tests/node/reach.rs"),
    (260..265, "cluster/tests/keys.rs"),
    (265..266, "service/tests/node/messages.rs"),
    (280..282, "service/tests/node/reach.rs"),
    (282..284, "service/src/packing/tests.rs"),
    (284..285, "service/tests/node/coalesce.rs"),
    (285..287, "service/src/packing/tests.rs"),
    (287..289, "service/tests/node/coalesce.rs"),
    (290..298, "service/tests/node/work.rs"),
    (315..316, "service/tests/node/closed.rs"),
    (316..317, "service/tests/node/joins.rs"),
    (317..318, "service/tests/node/threads.rs"),
    (320..321, "service/tests/node/closed.rs"),
    (326..327, "service/src/core/frame.rs"),
    (327..328, "service/tests/node/share.rs"),
    (345..346, "service/tests/node/sole.rs"),
    (349..350, "service/tests/node/sole.rs"),
    (350..352, "service/tests/node/threads.rs"),
    (352..353, "service/tests/node/sole.rs"),
    (380..396, "service/tests/node/scrub.rs"),
    (400..407, "block/tests/layer.rs"),
    (407..411, "block/tests/pool.rs"),
    (411..412, "block/tests/layer.rs"),
    (412..422, "block/tests/pool.rs"),
    (422..424, "block/tests/ublk.rs"),
    (430..433, "service/tests/node/threads.rs"),
    (433..434, "service/tests/node/locks.rs"),
    (434..435, "service/tests/node/returns.rs"),
    (440..447, "service/tests/node/given_back.rs"),
    (447..448, "service/tests/node/sole.rs"),
    (448..449, "service/tests/node/joins.rs"),
    (449..450, "service/tests/node/threads.rs"),
    (450..451, "service/tests/node/epochs.rs"),
    (451..453, "service/tests/node/work.rs"),
    (453..455, "service/src/core/frame.rs"),
    (461..467, "service/tests/node/offers.rs"),
    (467..472, "storage/tests/snapshots.rs"),
    (487..489, "service/tests/node/joins.rs"),
    (489..490, "service/tests/node/catch_up.rs"),
    (490..491, "storage/tests/snapshots.rs"),
    (491..492, "service/tests/node/snapshots.rs"),
    (492..493, "service/tests/node/threads.rs"),
    (493..495, "frontend/src/fuse/tests/forgets.rs"),
    (472..474, "service/tests/node/snapshots.rs"),
    (474..475, "storage/tests/snapshots.rs"),
    (475..477, "service/tests/node/snapshots.rs"),
    (477..478, "storage/tests/snapshots.rs"),
    (478..480, "service/tests/node/snapshots.rs"),
    (481..483, "storage/tests/snapshots.rs"),
    (483..484, "service/tests/node/snapshots.rs"),
    (495..497, "cluster/tests/machine.rs"),
    (497..498, "service/tests/node/snapshots.rs"),
    (498..501, "service/tests/node/since.rs"),
    (508..511, "service/tests/node/reconcile.rs"),
    (511..512, "service/src/core/history.rs"),
    (512..513, "service/tests/node/grants.rs"),
    (513..519, "service/tests/node/heir.rs"),
    (520..522, "service/tests/node/heir.rs"),
    (525..526, "service/tests/node/restart.rs"),
    (526..527, "service/tests/node/proofs.rs"),
    (501..502, "service/tests/node/joins.rs"),
];
/// Variants of threads that share a file.
const SHARED: std::ops::Range<u16> = 360..380;
/// Variants of locks that are left to clients.
const SOLE: std::ops::Range<u16> = 343..353;
/// How long one variant may stay unfound.
pub const BUDGET: Duration = Duration::from_secs(60);

/// Histories behind a mount, of which a second holds a thousand.
const MOUNT_TRIES: u64 = 20_000;

/// Histories of one variant that are run in any case, up to five times the budget.
const TRIES_MIN: u64 = 300;

/// How a variant was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The variant's name.
    pub name: String,
    /// The judge that objected, in one word; empty: nobody did.
    pub judge: String,
    /// Histories or crash states that it took.
    pub tries: u64,
    /// Seconds that it took.
    pub seconds: f64,
}

impl Found {
    /// Whether some judge objected.
    pub fn is_caught(&self) -> bool {
        !self.judge.is_empty()
    }
}

/// Processor time of this process: what budgets are counted in. A machine that does other things takes no
/// tries away.
pub(crate) fn worked() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Names of all variants that must be found here.
pub fn names() -> Vec<&'static str> {
    Bug::ALL.iter().filter(|bug| elsewhere(bug.0).is_none()).map(|bug| bug.1).collect()
}

/// The file with the test that finds a variant, if that is none of the simulator's.
pub fn elsewhere(bug: Bug) -> Option<&'static str> {
    let found = ELSEWHERE.iter().find(|(range, _)| range.contains(&(bug as u16)));
    found.map(|(_, file)| *file)
}

/// Hunts for one variant in a process of its own; histories of the cluster begin with seed `from`.
pub fn hunt(name: &str, from: u64) -> Result<Found, String> {
    let begin = Instant::now();
    let program = std::env::current_exe().map_err(|e| format!("where am I: {e}"))?;
    let mut child = Command::new(program)
        .args(["planted", "--from", &from.to_string(), "--inside", name])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("cannot start myself: {e}"))?;
    let (mut judge, mut tries) = (String::new(), 0);
    for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
        let line = line.map_err(|e| format!("{name}: {e}"))?;
        match line.split_once(' ') {
            Some(("try", number)) => tries = number.parse().unwrap_or(0),
            Some(("caught", by)) => judge = by.into(),
            _ => {}
        }
    }
    let status = child.wait().map_err(|e| format!("{name}: {e}"))?;
    match status.signal() {
        None => {}
        // Not its own doing: the machine has no memory left, or somebody ended it.
        Some(9) => {
            return Err(format!("{name}: killed after {tries} tries; is there memory enough?"));
        }
        Some(_) => judge = "panic".into(),
    }
    let seconds = begin.elapsed().as_secs_f64();
    Ok(Found { name: name.into(), judge, tries, seconds })
}

/// The hunt itself; prints `try N` before each try and `caught JUDGE` at the end of a good one.
pub fn inside(name: &str, from: u64) -> Result<bool, String> {
    let bug = Bug::named(name).ok_or_else(|| format!("there is no variant \"{name}\""))?;
    if (bug as u16) < CLUSTER || bug == Bug::AppendNotFenced {
        return Ok(in_crash_states(bug));
    }
    if kernel::BUGS.contains(&bug) {
        return Ok(behind_a_mount(bug));
    }
    let begin = worked();
    for (tries, seed) in (from..).enumerate() {
        // With the other runs of a busy machine in the caches, a try takes longer.
        let patient = if (tries as u64) < TRIES_MIN { 5 * BUDGET } else { BUDGET };
        if worked() - begin > patient {
            break;
        }
        println!("try {}", tries + 1);
        let preset = preset(bug, name, seed);
        choose(bug);
        let Some(why) = run(seed, preset.clone(), None).violation else { continue };
        choose(Bug::None);
        match run(seed, preset, None).violation {
            None => {
                println!("caught {}", judge_of(&why));
                eprintln!("{name}: seed {seed}: {why}");
                return Ok(true);
            }
            Some(own) => eprintln!("{name}: seed {seed} is not clean by itself: {own}"),
        }
    }
    Ok(false)
}

/// Variants of the mount are found by a kernel in front of its server.
fn behind_a_mount(bug: Bug) -> bool {
    for (tries, seed) in (0..MOUNT_TRIES).enumerate() {
        println!("try {}", tries + 1);
        choose(bug);
        let wrong = kernel::history(seed);
        choose(Bug::None);
        if let Err(why) = wrong
            && kernel::history(seed).is_ok()
        {
            println!("caught kernel");
            eprintln!("{bug:?}: {why}");
            return true;
        }
    }
    false
}

/// Variants of storage and persistence are the crash states' to find.
fn in_crash_states(bug: Bug) -> bool {
    let budget = Budget { time: BUDGET, ..Budget::default() };
    let Some(found) = catch(bug, budget) else { return false };
    println!("try {}", found.checked);
    println!("caught crash-states");
    eprintln!("{found}");
    true
}

/// Histories that reach the broken place, often.
fn preset(bug: Bug, name: &str, seed: u64) -> Preset {
    if let Some(scenario) = Scenario::named(name) {
        return scenario.preset(seed);
    }
    use Fault::{
        Coordinator, Crash, CutOff, Damage, Hang, Kill, LinkDown, OneWay, Planned, PowerCut,
        RegionLost, Slow, Stop,
    };
    let mut preset = Preset::drawn(seed);
    preset.joint = false;
    let head_lost = [OneWay(0, 1), LinkDown(0, 1), OneWay(1, 2), RegionLost(0), Crash(0)];
    let split = [OneWay(0, 1), OneWay(0, 2), CutOff(0)];
    let crashes = [Crash(0), Crash(1), Crash(2), PowerCut(0), PowerCut(1), PowerCut(2)];
    let joins = [RegionLost(1), RegionLost(2)];
    let links = [LinkDown(0, 1), LinkDown(0, 2), LinkDown(1, 2), OneWay(1, 0), OneWay(2, 0)];
    let ends = [Kill(0), Kill(1), Kill(2)];
    let stops = [Stop(0), Stop(1), Stop(2)];
    let damage = [Damage(1), Damage(2)];
    let slow = [Slow(1), Slow(2), OneWay(1, 0)];
    let planned = [Planned(0), Planned(1), Planned(2)];
    let coordinator = [Coordinator, Crash(1), Crash(2), CutOff(1)];
    match bug {
        Bug::RingOverrun | Bug::RingPastEnd => preset.make(Flavour::Large),
        Bug::BatchLimit | Bug::BadCopiesIgnored | Bug::LateCopies => preset.make(Flavour::Large),
        Bug::PermissionSkipped
        | Bug::LeaseUnchecked
        | Bug::NumberUnchecked
        | Bug::FutureEpochAccepted
        | Bug::ReapAllowed
        | Bug::CycleAllowed
        | Bug::NotEmptyRemoved
        | Bug::BrokenLogKept
        | Bug::RefusalUntold => preset.make(Flavour::Hostile),
        Bug::ExistenceByValue
        | Bug::CapabilityHidden
        | Bug::ExchangedUnasked
        | Bug::ReadRightForgotten
        | Bug::OwnerTrusted
        | Bug::RightsOfPastLost
        | Bug::StickyIgnored
        | Bug::GroupOfMaker
        | Bug::MaskIgnored
        | Bug::TruncatedUnasked
        | Bug::LinkOfOthers
        | Bug::OpenUnchecked => {
            by_guests(&mut preset, bug);
        }
        Bug::EndedSetidTrusted => {
            by_guests(&mut preset, bug);
            preset.make(Flavour::Full);
        }
        Bug::NamelessOfPast
        | Bug::GivenUncounted
        | Bug::LinksUncounted
        | Bug::AttributesUncounted
        | Bug::RefusedBetween => {
            by_guests(&mut preset, bug);
            preset.make(Flavour::Quota);
            if bug == Bug::NamelessOfPast {
                preset.pace = 20 * MS;
            }
        }
        Bug::PartLost | Bug::SnapshotPieceLost => {}
        Bug::PartlyCovered | Bug::UnlinkedCoalesced => {
            use crate::actor::Kind::*;
            preset.make(Flavour::Plain);
            (preset.nodes, preset.clients, preset.syncs, preset.pace) = (3, 3, 40, 50 * US);
            preset.insists = true;
            preset.favour = match bug {
                Bug::UnlinkedCoalesced => vec![Create, Write, Write, Link, Unlink, Rename],
                _ => vec![Write, Write, Write, Create],
            };
        }
        Bug::PackedOvertaken | Bug::UnpackedOvertakes => {
            preset.make(Flavour::Plain);
            (preset.nodes, preset.compression) = (3, Some(Compression::Lz4));
        }
        Bug::LocksUnreported
        | Bug::LocksOfEndedKept
        | Bug::LocksOfPastHead
        | Bug::DowngradeIgnored => {
            use crate::actor::Kind::{Create, Lock};
            preset.make(Flavour::Plain);
            (preset.pace, preset.closes) = (2 * MS, 60);
            preset.favour = vec![Create, Lock, Lock, Lock];
        }
        // Few files, locked all the time by all.
        bug if SOLE.contains(&(bug as u16)) => {
            use crate::actor::Kind::{Create, Lock};
            preset.make(Flavour::Plain);
            (preset.threads, preset.closes) = (2 + seed % 2, 60);
            preset.pace = [100 * US, 500 * US, 2 * MS][seed as usize % 3];
            preset.favour = vec![Create, Lock, Lock, Lock, Lock, Lock];
        }
        Bug::DirectoryUnpinned => {
            use crate::actor::Kind::{Mkdir, OpenDir};
            preset.make(Flavour::Plain);
            (preset.pace, preset.closes) = (2 * MS, 60);
            preset.favour = vec![Mkdir, OpenDir, OpenDir, OpenDir];
        }
        Bug::RefusalsKept | Bug::JudgementUnawaited => {
            by_threads(&mut preset, bug, seed);
            preset.make(Flavour::Full);
        }
        Bug::ReaderBesideJoint
        | Bug::JointRefusalCounts
        | Bug::UntakenUntold
        | Bug::JointAnsweredStale
        | Bug::JointUnawaited
        | Bug::JointOutOfTime
        | Bug::JointNamesKept
        | Bug::GivenForGood
        | Bug::UntakenShown
        | Bug::JointDoneAlready
        | Bug::JointTurnedOver
        | Bug::GivenTillTold
        | Bug::FoundGoneKept => jointly(&mut preset, seed),
        Bug::RangeUnjudged
        | Bug::RangeReadElsewhere
        | Bug::RangeTimesByOrder
        | Bug::RangeGrantStale
        | Bug::RangeKeptOnRecall
        | Bug::RangeWriteUnjudged
        | Bug::RangesUnreported => {
            preset.make(Flavour::Bytes);
            (preset.nodes, preset.clients, preset.ops) = (3, 3, 150);
            (preset.threads, preset.pace) = (1 + seed % 2, [200 * US, MS][seed as usize % 2]);
        }
        Bug::CloneGivenAway | Bug::CloneOfNow | Bug::DifferenceShared => {
            use crate::actor::Kind::{Clone, Create, Truncate, Write};
            preset.make(Flavour::Plain);
            preset.snapshots = true;
            (preset.clients, preset.ops, preset.pace) = (2, 120, 20 * MS);
            preset.favour = vec![Create, Write, Write, Write, Truncate, Clone];
        }
        bug if is_client(bug) => by_threads(&mut preset, bug, seed),
        Bug::ReservedUnsent | Bug::RedeemedTwice => preset.make(Flavour::Full),
        _ => preset.make(Flavour::Plain),
    }
    let (first, second): (&[Fault], &[Fault]) = match bug {
        Bug::EarlyAck | Bug::GrantBeforeReplicated | Bug::TakeOverShort => (&head_lost, &[]),
        Bug::JointOutOfTime => (&[Hang(0)], &[CutOff(0)]),
        Bug::LocksUnreported => (&head_lost, &[Planned(0), Hang(0), CutOff(0)]),
        Bug::SolesUnreported => (&head_lost, &[Planned(0), Hang(0), CutOff(0)]),
        Bug::LocksOfPastHead => (&[Hang(0), CutOff(0)], &[OneWay(0, 1), LinkDown(0, 1)]),
        Bug::LocksOfEndedKept | Bug::RoomUnsummed => (&ends, &[]),
        Bug::FencedServes => (&split, &[]),
        Bug::RingOverrun | Bug::GapAcknowledged => (&slow, &links),
        Bug::PublishedTooFar => (&crashes, &[]),
        Bug::CaughtUpEarly
        | Bug::JoinKeepsOld
        | Bug::MovedContent
        | Bug::CloneWhileJoining
        | Bug::ReservedUnsent => (&joins, &[]),
        Bug::StaleRecall
        | Bug::RetryTwice
        | Bug::ReportedTooFew
        | Bug::RewindAhead
        | Bug::ProgressOverstated => (&links, &crashes),
        Bug::LostNodeKept => (&crashes, &[]),
        Bug::EndUnheard => (&links, &ends),
        Bug::DeadTailDropped => (&ends, &[]),
        Bug::ExpelledNotTold | Bug::RecallIgnoresOperation => (&stops, &[]),
        Bug::DamageIgnored => (&damage, &[]),
        Bug::ClosedEarly | Bug::RightsOfPastLost => (&planned, &[]),
        Bug::NotInside | Bug::LeaseNotLookedAt | Bug::SealIgnored => (&stops, &links),
        Bug::RefusalsKept => (&stops, &crashes),
        Bug::NamelessOfPast => {
            (&[CutOff(0), CutOff(1), CutOff(2)], &[Hang(0), Hang(1), Hang(2), RegionLost(1)])
        }
        Bug::LossUntold => (&[Hang(0), Hang(1), Hang(2)], &[CutOff(0), CutOff(1), CutOff(2)]),
        Bug::PinForgotten => (&crashes, &links),
        Bug::UnpinLost => (&links, &links),
        Bug::CloseNotRepeated => (&links, &[OneWay(1, 0), OneWay(2, 0), Crash(0)]),
        Bug::PastForgotten | Bug::PinsOfLostFreed => (&planned, &crashes),
        Bug::PastOfExpelledForgotten => (&stops, &planned),
        Bug::TakeOverFrees => (&[Planned(0), Crash(0)], &[]),
        Bug::RestartIsLoss => (&[Crash(0), Crash(1), Crash(2)], &[]),
        Bug::ReturnUncut => (&split, &[Crash(0), Planned(0), OneWay(0, 1)]),
        Bug::CoordinatorForgets => (&coordinator, &[]),
        Bug::MinReplicasIgnored => {
            (&[CutOff(1), CutOff(2), Crash(1)], &[Crash(2), Hang(1), Hang(2)])
        }
        _ => (&[], &[]),
    };
    preset.focus([first, second].concat());
    preset.min_replicas = preset.min_replicas.min(preset.nodes as u16);
    if bug == Bug::CloseNotRepeated {
        // While the clients are at work, and not after that.
        preset.active = 150 * MS;
    }
    preset
}

/// Whether it is one of LibFS.
fn is_client(bug: Bug) -> bool {
    (150..180).contains(&(bug as u16))
        || SHARED.contains(&(bug as u16))
        || matches!(
            bug,
            Bug::UnpinLost
                | Bug::UnpinTaken
                | Bug::OpeningCounts
                | Bug::CloseNotRepeated
                | Bug::RecallBetween
                | Bug::GapRecalled
                | Bug::PastForgotten
                | Bug::PastOfExpelledForgotten
                | Bug::PinsOfLostFreed
                | Bug::TakeOverFrees
                | Bug::ListApart
                | Bug::NeededForgotten
                | Bug::MissedUntold
        )
}

/// Processes of several users.
fn by_guests(preset: &mut Preset, bug: Bug) {
    use crate::actor::Kind::*;
    preset.make(Flavour::Hostile);
    (preset.nodes, preset.clients, preset.faults) = (3, 4, 0);
    preset.pace = MS;
    preset.favour = match bug {
        Bug::ExistenceByValue => vec![SetXattr, RemoveXattr, Create, Chmod],
        Bug::CapabilityHidden => vec![SetXattr, Chmod, Create, Write, Write, Truncate],
        Bug::ExchangedUnasked => vec![Exchange, Exchange, Mkdir, Create, Chmod],
        Bug::StickyIgnored => vec![Create, Unlink, Rename, Exchange, Chmod],
        Bug::GroupOfMaker => vec![Create, Mkdir, Symlink, Unlink],
        Bug::MaskIgnored => vec![Create, SetAcl, SetAcl, Chmod, Read, List],
        Bug::TruncatedUnasked => vec![Truncate, Truncate, Truncate, Chmod, Chmod, Create],
        Bug::OwnerTrusted => vec![Create, Chown, Write, Write, Write],
        Bug::EndedSetidTrusted => vec![Append, Append, Write, Write, Chmod, Chmod, Create],
        Bug::RightsOfPastLost => vec![Create, Chmod, Chmod, Write, Read],
        Bug::NamelessOfPast => vec![Tmpfile, Tmpfile, Tmpfile, Quota],
        Bug::GivenUncounted => vec![Create, Chown, Chown, Quota],
        Bug::LinkOfOthers => vec![Create, Mkdir, Link, Link, Chmod],
        Bug::LinksUncounted => vec![Create, Mkdir, Link, Link, Link, Unlink, Quota],
        Bug::AttributesUncounted => vec![Create, SetXattr, SetXattr, SetXattr, RemoveXattr, Quota],
        Bug::RefusedBetween => vec![Create, Write, Write, Fallocate, Punch, Quota],
        Bug::ReadRightForgotten => vec![Create, Read, Read, Chmod, Chmod, Write],
        _ => Vec::new(),
    };
}

/// Processes that use the same directories.
fn jointly(preset: &mut Preset, seed: u64) {
    preset.make(Flavour::Joint);
    (preset.nodes, preset.clients, preset.faults) = (3, 3, 0);
    (preset.threads, preset.pace) = (1 + seed % 3, [200 * US, MS][seed as usize % 2]);
    (preset.ops, preset.syncs) = (150, 20);
}

/// Processes with LibFS, and threads that meet.
fn by_threads(preset: &mut Preset, bug: Bug, seed: u64) {
    use crate::actor::Kind::*;
    use Fault::{Crash, CrashAll, Hang};
    preset.make(Flavour::Plain);
    (preset.nodes, preset.clients, preset.faults) = (3, 3, 0);
    preset.threads = 4;
    preset.points = preset.points.min(8);
    preset.pace = [50 * US, MS][seed as usize % 2];
    // What is favoured shall be done, mostly to files that stay open.
    preset.closes = 60;
    preset.favour = match bug {
        Bug::GapIsHole | Bug::MovedKept => vec![Chmod, Chown, Write, Read, Read, Create],
        Bug::ListOfBefore | Bug::NameOfBefore => {
            vec![Create, Unlink, Rename, List, List, Exchange, Link, Chmod]
        }
        Bug::LookedUpOld | Bug::OldAnswerInstalled => {
            vec![Create, Chmod, Chmod, Chown, Utimes, Rename, Link, Append]
        }
        Bug::AnswerOfBefore => vec![SetXattr, RemoveXattr, SetAcl, Create],
        Bug::LongWriteIgnored | Bug::AppendGoesOn => {
            vec![Write, Append, Append, Append, Read, Create]
        }
        Bug::SizeOfBefore => vec![Append, Append, Append, Append, Write, Read, Create],
        bug if SHARED.contains(&(bug as u16)) => {
            vec![Write, Write, Write, Read, Read, Read, Append, Create]
        }
        Bug::CutExtentsKept => {
            vec![Truncate, Truncate, Truncate, Clone, Shift, Write, Write, Read, Read, Read]
        }
        Bug::SourceKept | Bug::OldExtents | Bug::PiecesDropped => {
            vec![Truncate, Clone, Write, Write, Read, Read, Read, Punch, Shift]
        }
        Bug::NeededForgotten => vec![Mkdir, Mkdir, Mkdir, Rename, Rename, Exchange],
        Bug::ListApart => vec![Write, Write, Write, Punch, Fallocate, Read, Read, Read],
        Bug::ReadUnchecked => vec![Truncate, Write, Write, Write, Read, Read, Punch, Create],
        Bug::RecallBetween => vec![Chmod, SetXattr, SetXattr, Read, Append, Write, List],
        // Some change the directory, which others want, and some what is in it.
        Bug::GapRecalled => vec![Create, Unlink, Link, Rename, Chmod, Chmod, Utimes, Append],
        // Few names lead to directories: most of what is drawn to change one finds none, and is drawn anew.
        Bug::GroundsUnchecked => {
            [vec![SetDefault; 12], vec![Tmpfile, Tmpfile, Mkdir, Project]].concat()
        }
        Bug::UnpinLost => vec![Create, Create, Tmpfile, Tmpfile, Unlink, Unlink, Write],
        Bug::UnpinTaken | Bug::CloseNotRepeated => vec![Tmpfile, Tmpfile, Tmpfile, Create, Unlink],
        Bug::OpeningCounts => vec![Create, Create, Unlink, Read, Chmod, Truncate],
        Bug::PinBeforeCount => vec![Create, Create, Unlink, Unlink, Read, Write],
        Bug::RefusalsKept => {
            vec![Write, Write, Append, Fallocate, Fallocate, Truncate, Unlink, Create]
        }
        Bug::UnlinkedClosed
        | Bug::PinForgotten
        | Bug::PastForgotten
        | Bug::PastOfExpelledForgotten
        | Bug::PinsOfLostFreed
        | Bug::TakeOverFrees => {
            vec![Tmpfile, Create, Create, Unlink, Unlink, Read, Write, Rename]
        }
        _ => Vec::new(),
    };
    match bug {
        // Lanes come round while nobody takes what is in them. (What is overrun after that is on its way already.)
        Bug::LaneOverrun => {
            preset.favour = vec![Write, Write, Write, Write, Write, Create];
            (preset.nodes, preset.clients, preset.threads) = (1, 1, 8);
            (preset.ops, preset.syncs, preset.pace) = (40, 1000, MS);
            (preset.write_min, preset.write_max, preset.file_max) = (700_000, 1_000_000, 1_000_000);
            preset.starts = vec![60 * MS];
            preset.script = Script::new(6).then(16 * MS, When::Now, &[(0, Hang(0), 8 * MS)]);
        }
        Bug::FrontierLate | Bug::FrontierIgnored => {
            preset.make(Flavour::Large);
            preset.favour = vec![Write, Write, Write, Read, Read, Create];
            (preset.clients, preset.threads, preset.ops, preset.syncs) = (1, 2, 100, 1000);
        }
        // Blocks are used again at once.
        Bug::ReadUnchecked => preset.capacity = 2 << 20,
        // Few slots, and requests that nobody waits for, one after the other.
        Bug::SlotCollectedTwice => {
            preset.favour = vec![Tmpfile, Tmpfile, Create, Unlink];
            (preset.clients, preset.tight) = (2, true);
            (preset.pace, preset.closes, preset.narrow) = (50 * US, 2, 1);
        }
        // A file is cut while another thread asks for its extents, which clones and shifts have made unknown.
        Bug::CutExtentsKept => {
            (preset.nodes, preset.clients, preset.threads, preset.tight) = (1, 1, 8, true);
            (preset.write_max, preset.file_max, preset.syncs) = (5000, 16_000, 100);
        }
        // The blocks of a clone are written over where its source still reads.
        Bug::SourceKept => {
            (preset.nodes, preset.clients, preset.threads) = (1, 1, 1 + seed % 2);
            (preset.capacity, preset.syncs) = (1 << 20, 100);
        }
        // What threads of one process do to each other.
        Bug::PiecesDropped | Bug::LongWriteIgnored => {
            (preset.clients, preset.tight) = (1 + seed as usize % 2, true)
        }
        // Many write to few files, and read them, across each other's pieces.
        Bug::CountedLate
        | Bug::NotDrained
        | Bug::LaneAwaited
        | Bug::TicketLeftEarly
        | Bug::RangesByStart
        | Bug::SizeOfBefore => {
            (preset.nodes, preset.clients, preset.threads, preset.tight) = (1, 1, 8, true);
            (preset.pace, preset.syncs, preset.ops) = (20 * US, 100, 120);
            preset.file_max = preset.file_max.min(12_000);
            if matches!(bug, Bug::CountedLate | Bug::NotDrained) {
                preset.narrow_file = Some("libfs/sync.rs");
            }
        }
        Bug::PadForgotten => {
            preset.make(Flavour::Large);
            preset.favour = vec![Write, Write, Write, Write, Read, Create];
            (preset.clients, preset.threads, preset.ops, preset.syncs) = (1, 4, 100, 1000);
        }
        // A reader stands in the middle of its copy, while what others write there is published in place; with few pieces
        // of log remembered the lists of extents come often.
        Bug::CopyUnchecked | Bug::CopyComesBack => {
            (preset.nodes, preset.clients, preset.threads, preset.tight) = (1, 1, 8, true);
            (preset.pace, preset.syncs, preset.ops) = (20 * US, 4, 150);
            preset.file_max = preset.file_max.min(12_000);
            preset.narrow_file = Some("libfs/data.rs");
        }
        // Who removes the name stands with the file locked, about to write that down; others want the file meanwhile.
        Bug::OpeningCounts | Bug::PinBeforeCount => {
            preset.narrow_file = Some("libfs/log.rs");
            (preset.nodes, preset.clients, preset.threads) = (1, 1, 8);
            (preset.pace, preset.syncs, preset.ops) = (20 * US, 100, 100);
            preset.closes = if bug == Bug::OpeningCounts { 1 } else { 3 };
        }
        // It has looked at the directory and stands, about to come in.
        Bug::GroundsUnchecked => {
            preset.narrow_file = Some("libfs/segment.rs");
            (preset.pace, preset.closes, preset.syncs, preset.ops) = (20 * US, 2, 100, 80);
        }
        Bug::GapRecalled => {
            // One has taken a number and stands, another is about to.
            preset.narrow_file = Some("libfs/log.rs");
            preset.pace = 20 * US;
            (preset.clients, preset.threads, preset.syncs) = (3, 6, 100);
        }
        Bug::UnpinLost => (preset.pace, preset.closes) = (5 * MS, 2),
        Bug::CloseNotRepeated => {
            (preset.pace, preset.closes, preset.syncs, preset.ops) = (2 * MS, 1, 100, 100)
        }
        // A request comes after an operation that another thread is still to write; then the node dies, and is there
        // again at once.
        Bug::UnpinTaken => {
            preset.narrow_file = Some("libfs/log.rs");
            (preset.nodes, preset.clients, preset.threads) = (1, 2, 8);
            (preset.pace, preset.closes, preset.syncs, preset.ops) = (2 * MS, 1, 100, 100);
            preset.script = Script::new(16).then(10 * MS, When::Now, &[(0, Crash(0), MS)]);
        }
        Bug::ListApart => preset.tight = true,
        Bug::NeededForgotten => (preset.clients, preset.tight) = (1, true),
        // Questions arrive while the head waits for what the third has.
        Bug::MissedUntold => {
            (preset.threads, preset.pace, preset.syncs, preset.ops) = (6, 200 * US, 100, 400);
            preset.script = Script::new(12).then(10 * MS, When::Whole, &[(0, CrashAll, MS)]);
        }
        // Time for faults.
        Bug::RefusalsKept
        | Bug::LossUntold
        | Bug::PinForgotten
        | Bug::PastForgotten
        | Bug::PastOfExpelledForgotten
        | Bug::PinsOfLostFreed
        | Bug::TakeOverFrees
        | Bug::NotInside
        | Bug::LeaseNotLookedAt
        | Bug::SealIgnored => (preset.pace, preset.syncs) = (20 * MS, 4),
        _ => {}
    }
}

/// The judge whose words these are.
fn judge_of(why: &str) -> &'static str {
    let known = [
        ("invariant: ", "invariants"),
        ("leases conflict", "leases"),
        ("a lock is ", "locks"),
        ("does not bar it", "locks"),
        ("a deadlock is told", "locks"),
        ("locks are held", "locks"),
        ("no progress", "progress"),
        ("no end after", "progress"),
        ("went on no more", "logs"),
        ("members ", "replicas"),
        ("region of node", "checker"),
        ("differs from its state", "reopening"),
        ("is written by session", "leases"),
        ("written beside others", "leases"),
        (" failed: ", "failure"),
        ("refused with", "refusals"),
        ("was refused", "refusals"),
        ("refused when its call", "refusals"),
        ("hostile", "hostile"),
        ("ended in order", "order"),
        ("is acknowledged, which", "replicas"),
        ("is not judged", "joint"),
        (" was taken", "joint"),
        (" is taken, and cannot be", "joint"),
        ("is not taken", "joint"),
        ("was done, and is lost", "joint"),
        ("has lost its place", "places"),
        ("inode ", "model"),
    ];
    known.iter().find(|(words, _)| why.contains(words)).map_or("other", |(_, judge)| judge)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who is said to find a variant names it, in a test that the soak runs.
    #[test]
    fn what_is_found_elsewhere_is_looked_for_there() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let soak = std::fs::read_to_string(root.join("scripts/soak.sh")).expect("the soak");
        for (bug, name, _) in Bug::ALL {
            let Some(file) = elsewhere(*bug) else { continue };
            let text = std::fs::read_to_string(root.join(file)).expect(file);
            // (Or it plants for its own thread, which takes no feature.)
            let for_itself = || text.split_once("fn planted_bugs_are_caught");
            let tests = text.split_once("feature = \"planted\"").or_else(for_itself);
            let (_, tests) = tests.expect(file);
            assert!(tests.contains(&format!("Bug::{bug:?}")), "{file} does not look for {name}");
            let (krate, test) = file.split_once('/').expect("a crate");
            let run = match test.strip_prefix("tests/") {
                Some(test) => format!("{krate}:{}", test.split(['/', '.']).next().expect("a name")),
                None => format!("-p {krate} --lib"),
            };
            assert!(soak.contains(&run), "the soak does not run the tests of {file}");
        }
    }
}
