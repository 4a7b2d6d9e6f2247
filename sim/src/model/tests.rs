use super::*;

fn file(text: &str) -> State {
    State::new(0o100_644, 0, 0, Body::File(text.as_bytes().to_vec(), 1))
}

fn model() -> Model {
    Model::new(State::new(0o40_755, 0, 0, Body::Dir(BTreeMap::new())))
}

#[test]
fn who_does_not_look_at_attributes_does_not_decide_them() {
    let mut m = model();
    let s = m.begin();
    let mut with = file("a");
    with.xattrs = Some(Xattrs::from([(b"user.a".to_vec(), b"1".to_vec())]));
    m.appended(s, 1, vec![(10, file("a"))]);
    m.appended(s, 2, vec![(10, with.clone())]);
    m.ended(s, 2);
    let mut blind = file("a");
    blind.xattrs = None;
    assert!(m.observe(None, 10, &blind).is_ok());
    assert!(m.observe(None, 10, &with).is_ok());
    assert!(m.observe(None, 10, &file("a")).is_err(), "decided by now");
}

#[test]
fn who_sees_what_it_made_itself_sees_that_what_came_later_is_lost() {
    let mut m = model();
    let (a, b) = (m.begin(), m.begin());
    m.appended(a, 1, vec![(10, file("a"))]);
    m.appended(b, 1, vec![(10, file("b"))]);
    m.ended(b, 1);
    assert!(m.observe(Some(a), 10, &file("a")).is_ok());
    assert_eq!(m.current(10), Some(&file("a")));
    assert!(m.observe(None, 10, &file("b")).is_err(), "decided by now");
}

#[test]
fn an_attribute_has_the_value_that_was_set_last() {
    let mut m = model();
    let s = m.begin();
    let mut with = file("a");
    with.xattrs = Some(Xattrs::from([(b"user.a".to_vec(), b"1".to_vec())]));
    m.appended(s, 1, vec![(10, with)]);
    assert!(m.may_have_xattr(10, b"user.a", Some(b"1")).is_ok());
    assert!(m.may_have_xattr(10, b"user.a", Some(b"2")).is_err());
    assert!(m.may_have_xattr(10, b"user.a", None).is_err());
    assert!(m.may_have_xattr(10, b"user.b", None).is_ok());
    m.appended(s, 2, vec![(10, file("a"))]);
    assert!(m.may_have_xattr(10, b"user.a", Some(b"1")).is_err());
    m.headless(s);
    assert!(m.may_have_xattr(10, b"user.a", Some(b"1")).is_ok(), "the removal may be lost");
}

#[test]
fn what_fsync_covered_must_be_seen_and_the_cut_is_one_for_all_inodes() {
    let mut m = model();
    let s = m.begin();
    for (seq, text) in [(1, "a"), (2, "b"), (3, "c")] {
        m.appended(s, seq, vec![(10, file(text))]);
    }
    m.appended(s, 4, vec![(11, file("late"))]);
    m.vouched(s, 2).unwrap();
    m.ended(s, 4);
    assert!(m.observe(None, 10, &file("a")).is_err(), "below what fsync covered");
    assert!(m.observe(None, 10, &file("b")).is_ok());
    assert!(m.observe(None, 10, &file("c")).is_err(), "decided already");
    assert!(m.observe(None, 11, &file("late")).is_err(), "3 is lost, so is 4");
    assert!(m.observe(None, 11, &State::gone()).is_ok());
}

#[test]
fn a_living_session_shows_its_last_version_only() {
    let mut m = model();
    let (a, b) = (m.begin(), m.begin());
    m.appended(a, 1, vec![(10, file("a"))]);
    m.appended(a, 2, vec![(10, file("b"))]);
    assert!(m.observe(Some(b), 10, &file("a")).is_err());
    assert!(m.observe(Some(b), 10, &file("b")).is_ok());
    m.ended(a, 2);
    assert!(m.observe(Some(b), 10, &file("a")).is_err(), "another client saw it: it stays");
}

/// Histories of one file that several sessions write in parts, with what truly became of each, and every other thing that might have
/// become of it: an account that goes through all of them.
mod shared {
    use std::ops::Range;

    use base::random::Random;

    use super::*;

    const FILE: u64 = 10;
    const OTHER: u64 = 11;
    const BLOCKS: usize = 3;

    /// An operation, as the test has it.
    #[derive(Clone, Debug)]
    struct Deed {
        session: usize,
        seq: u64,
        ino: u64,
        at: u64,
        time: u64,
        clears: bool,
        /// Where it writes, or all of it anew.
        part: Option<usize>,
        data: Vec<u8>,
        /// What it was made of, of those before it.
        rests_on: Vec<usize>,
        seen_by: Vec<usize>,
        lasting: bool,
        never: bool,
    }

    impl Deed {
        fn blocks(&self) -> Range<usize> {
            match self.part {
                Some(offset) => offset / BLOCK..(offset + self.data.len()).div_ceil(BLOCK),
                None => 0..BLOCKS,
            }
        }
    }

    #[derive(Clone, PartialEq, Eq, Debug)]
    struct Shown {
        mtime: u64,
        ctime: u64,
        mode: u32,
        bytes: Vec<u8>,
    }

    impl Shown {
        fn state(&self) -> State {
            let mut state = State::new(self.mode, 0, 0, Body::File(self.bytes.clone(), 1));
            (state.mtime, state.ctime) = (self.mtime, self.ctime);
            state
        }
    }

    struct Rig {
        random: Random,
        model: Model,
        /// In the order in which they were appended.
        deeds: Vec<Deed>,
        /// Those that a head has taken, in its order.
        stream: Vec<usize>,
        /// So much of the stream is on every member.
        durable: usize,
        /// So much of it a session's node has.
        has: BTreeMap<usize, usize>,
        alive: Vec<usize>,
        /// Who may write each block of the file.
        owner: [Option<usize>; BLOCKS],
        /// Sessions that have ended, and how much of each there truly is.
        over: BTreeMap<usize, u64>,
        /// What is written is often what is there already.
        alike: bool,
        /// What was seen tells of each block which operation was the last on it, and nothing else is seen.
        exact: bool,
        /// They write another file, too.
        other: bool,
        clock: u64,
        checked: u64,
        refused: u64,
    }

    impl Rig {
        fn new(seed: u64) -> Self {
            let mut random = Random::new(seed);
            let mut m = model();
            let maker = m.begin();
            for ino in [FILE, OTHER] {
                let body = Body::File(vec![0; BLOCKS * BLOCK], 1);
                m.appended(maker, ino, vec![(ino, State::new(0o104_755, 0, 5, body))]);
            }
            m.vouched(maker, OTHER).unwrap();
            m.ended(maker, OTHER);
            let alive: Vec<usize> = (0..3).map(|_| m.begin()).collect();
            let alike = random.chance(1, 4);
            let other = random.chance(1, 3);
            let exact = !alike && !other;
            let (deeds, stream, over) = (Vec::new(), Vec::new(), BTreeMap::new());
            let has = alive.iter().map(|s| (*s, 0)).collect();
            let (owner, durable) = ([None; BLOCKS], 0);
            let (clock, checked, refused) = (10, 0, 0);
            Self {
                random,
                model: m,
                deeds,
                stream,
                durable,
                has,
                alive,
                owner,
                over,
                alike,
                exact,
                other,
                clock,
                checked,
                refused,
            }
        }

        fn one(&mut self) -> Option<usize> {
            let count = self.alive.len() as u64;
            (count > 0).then(|| self.alive[self.random.below(count) as usize])
        }

        fn is_there(&self, deed: &Deed) -> bool {
            self.over.get(&deed.session).is_none_or(|upto| deed.seq <= *upto)
        }

        /// What the file shows with some of the operations on it.
        fn show(&self, ino: u64, some: impl Fn(usize, &Deed) -> bool) -> Shown {
            let (mut mtime, mut ctime, mut mode, mut bytes) =
                (5, 5, 0o104_755, vec![0; BLOCKS * BLOCK]);
            for (_, deed) in
                self.deeds.iter().enumerate().filter(|(i, d)| d.ino == ino && some(*i, d))
            {
                match deed.part {
                    Some(offset) => {
                        bytes[offset..offset + deed.data.len()].copy_from_slice(&deed.data);
                        ctime = ctime.max(deed.time);
                        mtime = ctime;
                        if deed.clears {
                            mode &= !0o6000;
                        }
                    }
                    None => {
                        (bytes, mtime, ctime, mode) =
                            (deed.data.clone(), deed.time, deed.time, 0o104_755);
                    }
                }
            }
            Shown { mtime, ctime, mode, bytes }
        }

        /// The head reads the log of a session, up to so many operations.
        fn take(&mut self, session: usize, most: usize) {
            let mut own = (0..self.deeds.len()).filter(|i| {
                let deed = &self.deeds[*i];
                deed.session == session && self.is_there(deed) && !self.stream.contains(i)
            });
            let some: Vec<usize> = own.by_ref().take(most).collect();
            self.stream.extend(some);
        }

        /// What others have done is on the node of a session.
        fn show_all_to(&mut self, session: usize) {
            for other in self.alive.clone() {
                if other != session {
                    self.take(other, usize::MAX);
                }
            }
            self.has.insert(session, self.stream.len());
        }

        /// What the node of a session has of the file: nothing of it that no head has taken.
        fn on_node(&self) -> Shown {
            self.show(FILE, |i, _| self.stream.contains(&i))
        }

        /// Where faults have left doubt, the node says it.
        fn settle(&mut self, session: usize, range: Option<Range<u64>>) {
            let Some(blocks) = self.model.unsettled(FILE, session, range) else {
                // (It has lost the lease that it had: the answer waits for what it did.)
                self.take(session, usize::MAX);
                let state = self.on_node().state();
                let told = self.model.observe_early(session, FILE, &state);
                assert_eq!(told, Ok(()), "{:#?}", self.brief());
                return self.saw(session, 0..BLOCKS, false);
            };
            for block in blocks {
                let (node, from) = (self.on_node(), block * BLOCK);
                let mut got = node.bytes[from..from + BLOCK].to_vec();
                let own =
                    self.stream.iter().map(|i| &self.deeds[*i]).filter(|d| d.session == session);
                let after = own.map(|d| d.seq).max().unwrap_or(0);
                self.model.lay_own_over((FILE, session), after, from, &mut got);
                let look = Look::Bytes { from, want: BLOCK, got: &got };
                let told = self.model.glimpse(&[session], FILE, u64::MAX, false, &look);
                assert_eq!(told, Ok(()), "block {block} of {session} {:#?}", self.brief());
                self.saw(session, block..block + 1, false);
            }
        }

        /// The test notes what a session knows from what it has seen of some blocks.
        fn saw(&mut self, session: usize, blocks: Range<usize>, lasting: bool) {
            for i in 0..self.deeds.len() {
                let deed = &self.deeds[i];
                let (d, here) = (deed.blocks(), deed.ino == FILE);
                if !here || d.start.max(blocks.start) >= d.end.min(blocks.end) {
                    continue;
                }
                let there = self.is_there(deed);
                let deed = &mut self.deeds[i];
                match there {
                    true if lasting => deed.lasting = true,
                    true => deed.seen_by.push(session),
                    false => deed.never = true,
                }
            }
            // What came after it in its log is not there either, nor what was made of it.
            for i in 0..self.deeds.len() {
                let Deed { session, ref rests_on, .. } = self.deeds[i];
                let earlier = (0..i).filter(|j| self.deeds[*j].session == session);
                let lost = earlier.chain(rests_on.iter().copied()).any(|j| self.deeds[j].never);
                self.deeds[i].never |= lost;
            }
        }

        fn append(&mut self, session: usize, ino: u64, part: Option<usize>, data: Vec<u8>) {
            let seq = 1 + self.deeds.iter().filter(|d| d.session == session).count() as u64;
            // (What clients know of others' times is not much.)
            self.clock += 3;
            let time = self.clock - self.random.below(if part.is_some() { 12 } else { 1 });
            let clears = part.is_some() && self.random.chance(1, 6);
            let mut state = self.model.current(ino).unwrap().clone();
            match part {
                Some(offset) => {
                    let loose = Vec::new();
                    let part = Part { offset, data: data.clone().into(), time, clears, loose };
                    part.apply(&mut state);
                    self.model.appended_part(session, seq, (ino, state), part);
                }
                None => {
                    (state.mtime, state.ctime, state.mode) = (time, time, 0o104_755);
                    state.body = Body::File(data.clone(), 1);
                    self.model.appended(session, seq, vec![(ino, state)]);
                }
            }
            let (at, seen_by) = (self.model.now(), Vec::new());
            let (lasting, never) = (false, false);
            let mut deed = Deed {
                session,
                seq,
                ino,
                at,
                time,
                clears,
                part,
                data,
                rests_on: Vec::new(),
                seen_by,
                lasting,
                never,
            };
            // (What is known to be lost by then it does not rest on.)
            let rests = |(i, before): (usize, &Deed)| {
                let (a, b) = (before.blocks(), deed.blocks());
                let meet = a.start.max(b.start) < a.end.min(b.end);
                (before.ino == ino && meet && !before.never).then_some(i)
            };
            deed.rests_on = self.deeds.iter().enumerate().filter_map(rests).collect();
            self.deeds.push(deed);
        }

        /// Bytes that nobody has written before, or those that are there. (What comes back to what it was before it was something else no random
        /// bytes do.)
        fn data(&mut self, ino: u64, range: Range<usize>) -> Vec<u8> {
            let mut data = vec![0; range.len()];
            self.random.fill(&mut data);
            if self.alike && self.random.chance(1, 2) {
                let there = self.show(ino, |_, deed| self.is_there(deed));
                data.copy_from_slice(&there.bytes[range]);
            }
            data
        }

        fn write(&mut self) {
            let Some(session) = self.one() else { return };
            let block = self.random.below(BLOCKS as u64) as usize;
            let mut end = block + 1 + usize::from(self.random.chance(1, 4));
            end = end.min(BLOCKS);
            if self.owner[block..end].iter().any(|owner| *owner != Some(session)) {
                if self.random.chance(1, 2) {
                    return;
                }
                // They come from who has them.
                self.show_all_to(session);
                self.owner[block..end].fill(Some(session));
            }
            let (mut offset, mut upto) = (block * BLOCK, end * BLOCK);
            if self.random.chance(1, 3) {
                offset += self.random.below(BLOCK as u64 - 1) as usize;
                upto -= self.random.below(((upto - offset).min(BLOCK) - 1) as u64) as usize;
            }
            self.settle(session, Some(offset as u64..upto as u64));
            let data = self.data(FILE, offset..upto);
            self.append(session, FILE, Some(offset), data);
        }

        /// Somebody has the file alone, and perhaps does something with all of it.
        fn alone(&mut self) {
            let Some(session) = self.one() else { return };
            self.show_all_to(session);
            self.owner = [Some(session); BLOCKS];
            if self.random.chance(1, 2) {
                self.settle(session, None);
                let data = self.data(FILE, 0..BLOCKS * BLOCK);
                self.append(session, FILE, None, data);
            } else if self.random.chance(1, 2) {
                let shown = self.truth();
                self.probe(0..BLOCKS, true);
                self.model.observe_early(session, FILE, &shown.state()).unwrap();
                self.saw(session, 0..BLOCKS, false);
            } else if !self.exact {
                let shown = self.truth();
                let Shown { mtime, ctime, mode, .. } = shown;
                let fits = |s: &State| (s.mtime, s.ctime, s.mode) == (mtime, ctime, mode);
                let now = self.model.now();
                let told = self.model.glimpse(&[session], FILE, now, false, &Look::Of(&fits));
                assert_eq!(told, Ok(()), "{mtime} {ctime} {mode:o} {:#?}", self.brief());
            }
        }

        fn truth(&self) -> Shown {
            self.show(FILE, |_, deed| self.is_there(deed))
        }

        /// Somebody reads in what it has.
        fn read(&mut self) {
            let Some(session) = self.one() else { return };
            let Some(block) = (0..BLOCKS).find(|b| self.owner[*b] == Some(session)) else { return };
            let mut end = block + 1;
            while end < BLOCKS && self.owner[end] == Some(session) {
                end += 1;
            }
            self.probe(block..end, false);
            let (truth, since) = (self.truth(), self.model.now());
            let late = self.random.chance(1, 3);
            if late {
                for _ in 0..self.random.below(4) {
                    self.write();
                }
            }
            if !self.alive.contains(&session) {
                return;
            }
            let got = &truth.bytes[block * BLOCK..end * BLOCK];
            let look = Look::Bytes { from: block * BLOCK, want: (end - block) * BLOCK, got };
            self.model.glimpse(&[session], FILE, since, false, &look).unwrap();
            if !late {
                self.saw(session, block..end, false);
            } else {
                // It was shown what was there when it looked.
                let upto = self.deeds.iter().take_while(|d| d.at <= since).count();
                let later = self.deeds.split_off(upto);
                self.saw(session, block..end, false);
                self.deeds.extend(later);
            }
        }

        fn sync(&mut self) {
            let Some(session) = self.one() else { return };
            self.take(session, usize::MAX);
            self.durable = self.stream.len();
            let last = self.deeds.iter().filter(|d| d.session == session).map(|d| d.seq).max();
            self.model.vouched(session, last.unwrap_or(0)).unwrap();
            for d in self.deeds.iter_mut().filter(|d| d.session == session) {
                d.lasting = true;
            }
        }

        /// Some sessions end with what nobody else has: the end of the stream, and of their logs.
        fn lose(&mut self) {
            let gone: Vec<usize> =
                self.alive.clone().into_iter().filter(|_| self.random.chance(1, 2)).collect();
            self.alive.retain(|s| !gone.contains(s));
            let has = self.alive.iter().map(|s| self.has[s]).max().unwrap_or(0);
            let least = has.max(self.durable).min(self.stream.len());
            let keeps = least + self.random.below((self.stream.len() - least) as u64 + 1) as usize;
            self.stream.truncate(keeps);
            for (session, upto) in &mut self.over {
                // (The head that had it is lost by now, too.)
                let own =
                    self.stream.iter().map(|i| &self.deeds[*i]).filter(|d| d.session == *session);
                *upto = own.map(|d| d.seq).max().unwrap_or(0);
            }
            for session in gone {
                let own =
                    self.stream.iter().map(|i| &self.deeds[*i]).filter(|d| d.session == session);
                let upto = own.map(|d| d.seq).max().unwrap_or(0);
                let last = self.deeds.iter().filter(|d| d.session == session).map(|d| d.seq).max();
                self.over.insert(session, upto);
                self.model.ended(session, last.unwrap_or(0));
                self.owner.iter_mut().for_each(|owner| *owner = owner.filter(|o| *o != session));
                if self.random.chance(2, 3) {
                    let anew = self.model.begin();
                    self.alive.push(anew);
                    self.has.insert(anew, self.stream.len());
                }
            }
        }

        /// Whether those that count, by how much there is of each session, may be all that there is.
        fn may_be(&self, cuts: &BTreeMap<usize, u64>) -> bool {
            let there = |d: &Deed| cuts.get(&d.session).is_none_or(|upto| d.seq <= *upto);
            self.deeds.iter().all(|deed| {
                let certain = deed.lasting || deed.seen_by.iter().any(|s| self.alive.contains(s));
                if !there(deed) {
                    return !certain;
                }
                // All that it was made of is there.
                !deed.never && deed.rests_on.iter().all(|before| there(&self.deeds[*before]))
            })
        }

        /// Every thing that may be the end of the sessions that have ended.
        fn all_cuts(&self) -> Vec<BTreeMap<usize, u64>> {
            let mut all = vec![BTreeMap::new()];
            for session in self.over.keys() {
                let last = self.deeds.iter().filter(|d| d.session == *session).map(|d| d.seq).max();
                let last = last.unwrap_or(0);
                let more = all.iter().flat_map(|cuts: &BTreeMap<usize, u64>| {
                    (0..=last).map(move |upto| {
                        let mut cuts = cuts.clone();
                        cuts.insert(*session, upto);
                        cuts
                    })
                });
                all = more.collect();
                if all.len() > 3000 {
                    return Vec::new();
                }
            }
            all
        }

        /// Looks whether the model takes of some blocks of the file (or of all of it) what may be, and nothing else.
        fn probe(&mut self, blocks: Range<usize>, whole: bool) {
            if !self.exact || !self.random.chance(1, 3) {
                return;
            }
            let Some(session) = self.one() else { return };
            let all = self.all_cuts();
            let bytes =
                |shown: &Shown| shown.bytes[blocks.start * BLOCK..blocks.end * BLOCK].to_vec();
            let there = |cuts: &BTreeMap<usize, u64>| {
                self.show(FILE, |_, d| cuts.get(&d.session).is_none_or(|upto| d.seq <= *upto))
            };
            let may: Vec<Shown> = all.iter().filter(|cuts| self.may_be(cuts)).map(&there).collect();
            let mut asked: Vec<Shown> = all.iter().map(&there).collect();
            // And some of what is of different sets of operations here and there.
            for _ in 0..asked.len().min(20) {
                let (a, b) =
                    (self.random.below(asked.len() as u64), self.random.below(asked.len() as u64));
                let mut mixed = asked[a as usize].clone();
                mixed.bytes[BLOCK..].copy_from_slice(&asked[b as usize].bytes[BLOCK..]);
                asked.push(mixed);
            }
            let picked =
                (0..asked.len().min(30)).map(|_| self.random.below(asked.len() as u64) as usize);
            for i in picked.collect::<Vec<_>>() {
                let seen = &asked[i];
                let allowed = match whole {
                    true => may.contains(seen),
                    false => may.iter().any(|may| bytes(may) == bytes(seen)),
                };
                let mut model = self.model.clone();
                let judged = match whole {
                    true => model.observe_early(session, FILE, &seen.state()),
                    false => {
                        let (from, got) = (blocks.start * BLOCK, bytes(seen));
                        let look = Look::Bytes { from, want: got.len(), got: &got };
                        model.glimpse(&[session], FILE, model.now(), false, &look)
                    }
                };
                self.checked += 1;
                self.refused += u64::from(!allowed);
                assert_eq!(
                    judged.is_ok(),
                    allowed,
                    "{judged:?} {blocks:?} {whole} {:#?}",
                    self.brief()
                );
            }
        }

        fn brief(&self) -> Vec<String> {
            let all = self.deeds.iter().map(|d| {
                let there = self.is_there(d);
                format!(
                    "{}.{} at {} time {} blocks {:?} {} seen {:?} lasting {} never {} there {there}",
                    d.session, d.seq, d.at, d.time, d.blocks(), d.part.is_some(), d.seen_by, d.lasting, d.never
                )
            });
            all.chain([format!("alive {:?} over {:?}", self.alive, self.over)]).collect()
        }

        fn step(&mut self) {
            match self.random.below(24) {
                0..=11 => self.write(),
                12..=14 => self.read(),
                15 | 16 => self.alone(),
                17..=19 => {
                    if let Some(session) = self.one() {
                        let most = 1 + self.random.below(3) as usize;
                        self.take(session, most);
                    }
                }
                20 => self.sync(),
                21 if self.other => {
                    // (The first that is alive has it.)
                    if let (Some(session), true) =
                        (self.alive.first().copied(), self.random.chance(1, 2))
                    {
                        self.show_all_to(session);
                        let seen = self.show(OTHER, |_, d| self.is_there(d)).state();
                        self.model.observe_early(session, OTHER, &seen).unwrap();
                        let data = self.data(OTHER, 0..BLOCKS * BLOCK);
                        self.append(session, OTHER, None, data);
                    }
                }
                22 => self.lose(),
                _ => self.model.forget_before(self.model.now()),
            }
        }

        /// All that is left is taken, and every member shows it.
        fn end(&mut self) {
            for session in self.alive.clone() {
                self.take(session, usize::MAX);
            }
            for _ in 0..2 {
                for ino in [FILE, OTHER] {
                    let shown = self.show(ino, |_, deed| self.is_there(deed));
                    let told = self.model.observe(None, ino, &shown.state());
                    assert_eq!(told, Ok(()), "{:#?}", self.brief());
                    let mut wrong = shown;
                    wrong.bytes[self.random.below((BLOCKS * BLOCK) as u64) as usize] ^= 1;
                    assert!(self.model.observe(None, ino, &wrong.state()).is_err());
                }
            }
        }
    }

    #[test]
    fn what_becomes_of_shared_files_is_taken_and_nothing_else() {
        let count = std::env::var("MODEL_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
        let from = std::env::var("MODEL_FROM").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        let (mut checked, mut refused) = (0, 0);
        for seed in from..from + count {
            let run = std::panic::AssertUnwindSafe(|| {
                let mut rig = Rig::new(seed);
                for _ in 0..20 + rig.random.below(30) {
                    rig.step();
                }
                rig.end();
                (rig.checked, rig.refused)
            });
            eprintln!("seed {seed}");
            let (some, not) = run.0();
            (checked, refused) = (checked + some, refused + not);
        }
        eprintln!("{checked} sights, {refused} of them of what cannot be");
        assert!(refused * 4 > count && checked > 2 * count, "too few were asked about");
    }
}
