//! The coordinator's decisions, with nodes that say anything at any time. The machine checks its
//! own invariants after each step; beyond them epochs never fall, and what was persisted can be
//! started from.

use std::collections::BTreeMap;

use base::{Epoch, Level, NodeId, StreamSeq};
use cluster::coordinator::machine::{Action, Event, Machine, Patience, Speaker, VolumeSpec};
use cluster::coordinator::message::Choice;
use cluster::coordinator::store::{Image, Seat};
use cluster::coordinator::{DataState, Registration};

use crate::input::Input;

const CLUSTER: u128 = 7;
const VOLUMES: [&str; 3] = ["data", "more", "none such"];

fn specs() -> [VolumeSpec; 2] {
    let nodes = vec![NodeId(1), NodeId(2), NodeId(3), NodeId(4)];
    [
        VolumeSpec { name: "data".into(), replicas: 3, min_replicas: 2, nodes },
        VolumeSpec { name: "more".into(), replicas: 1, ..VolumeSpec::default() },
    ]
}

fn speaker(input: &mut Input<'_>) -> Speaker {
    let bits = input.u8();
    Speaker {
        volume: VOLUMES[usize::from(bits & 3) % 3].into(),
        node: NodeId(1 + u32::from(bits >> 2 & 7)),
        incarnation: u64::from(bits >> 5 & 3),
    }
}

fn registration(input: &mut Input<'_>) -> Registration {
    let Speaker { volume, node, incarnation } = speaker(input);
    let epoch = Epoch(input.odd() as u32);
    Registration {
        volume,
        node,
        incarnation,
        position: StreamSeq(input.odd()),
        state: if input.flag() { DataState::Fresh } else { DataState::Intact { epoch } },
        tcp: None,
        run_dir: "/run".into(),
        info: String::new(),
        level: Level(1 + u16::from(input.flag())),
        ..Registration::default()
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let patience = Patience::default();
    let start = |image, now| {
        Machine::new(CLUSTER, &specs(), patience, image, now).expect("its own state is accepted")
    };
    let (mut machine, mut now) = (start(None, 0), 0u64);
    let mut kept: Option<Image> = None;
    let mut epochs: BTreeMap<String, Epoch> = BTreeMap::new();
    for _ in 0..400 {
        if input.is_empty() {
            break;
        }
        now += u64::from(input.u8()) * 8_000_000;
        let event = match input.below(10) {
            0 | 1 => Event::Register(registration(&mut input)),
            2 => Event::Heartbeat(speaker(&mut input), StreamSeq(input.odd())),
            3 => Event::Disconnected(speaker(&mut input)),
            4 => {
                let (by, node) = (speaker(&mut input), NodeId(input.u8().into()));
                let known = epochs.get(&by.volume).copied().unwrap_or_default();
                let epoch = if input.flag() { known } else { Epoch(input.odd() as u32) };
                let incarnation = if input.flag() { by.incarnation } else { input.u8().into() };
                Event::CaughtUp(by, Seat { node, incarnation }, epoch)
            }
            5 => {
                let (by, node) = (speaker(&mut input), NodeId(input.u8().into()));
                let known = epochs.get(&by.volume).copied().unwrap_or_default();
                let epoch = if input.flag() { known } else { Epoch(input.odd() as u32) };
                Event::Suspect(by, node, epoch)
            }
            6 => Event::Leave(speaker(&mut input)),
            7 => {
                let volume = VOLUMES[input.below(3)];
                let shown = machine.copies(volume).unwrap_or_default();
                let copy = shown.copies.into_iter().find(|copy| copy.may_be_chosen);
                match copy.filter(|_| input.flag()) {
                    Some(copy) => {
                        let DataState::Intact { epoch } = copy.state else { continue };
                        let (node, incarnation) = (copy.node, copy.incarnation);
                        let position = copy.position;
                        let choice = Choice { node, incarnation, epoch, position };
                        Event::Choose(volume.into(), choice)
                    }
                    None => Event::Force(volume.into()),
                }
            }
            8 => {
                machine = start(kept.clone(), now);
                continue;
            }
            _ => Event::Tick,
        };
        let (verdict, actions) = machine.step(event, now);
        assert!(verdict.is_ok() || verdict.is_err_and(|text| !text.is_empty()));
        for action in actions {
            match action {
                Action::Persist(image) => {
                    assert_eq!(Image::decode(&image.encode()).as_ref(), Ok(&image));
                    kept = Some(image);
                }
                Action::Push(_, view) => {
                    let before = epochs.insert(view.volume.clone(), view.epoch);
                    assert!(before.unwrap_or_default() <= view.epoch, "{}", view.volume);
                    let image = kept.as_ref().and_then(|image| image.volumes.get(&view.volume));
                    let durable = image.map(|chain| chain.epoch).unwrap_or_default();
                    assert_eq!(durable, view.epoch, "told before it was persisted");
                }
            }
        }
    }
}
