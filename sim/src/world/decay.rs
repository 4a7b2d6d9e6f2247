//! When all has come to rest, some of what lies on the members rots: blocks of files, their checksums, pages of the tree;
//! never the same block on two of them. Each is told to read all that it has. What it then has is judged as ever: all of
//! it was found and mended, or the history is wrong. (Before, programs read what they have mapped, where nobody promises
//! that they are not the first to see it.)

use std::collections::BTreeSet;

use base::InodeId;

use super::*;

/// Places that rot, at most.
const PLACES: u64 = 8;
/// Items of the tree looked at in one go.
const ITEMS: usize = 10_000;

impl World<'_> {
    pub(crate) fn decay(&mut self) -> Result<(), String> {
        self.decayed = Some(self.now);
        let there: Vec<usize> =
            (0..self.hosts.len()).filter(|n| self.hosts[*n].node.is_some()).collect();
        if there.len() < 2 {
            return Ok(());
        }
        let mut taken = BTreeSet::new();
        for _ in 0..1 + self.random.below(PLACES) {
            let n = there[self.random.below(there.len() as u64) as usize];
            self.rot_somewhere(n, &mut taken)?;
        }
        for n in there {
            self.deliver(n, Event::Scrub)?;
        }
        Ok(())
    }

    fn rot_somewhere(&mut self, n: usize, taken: &mut BTreeSet<(u64, u64)>) -> Result<(), String> {
        let fault = |e: &dyn std::fmt::Display| format!("decay: {e}");
        let Some(node) = &self.hosts[n].node else { return Ok(()) };
        let volume = node.volume();
        let Some(base) = volume.sums_base() else { return Ok(()) };
        let root = volume.root().page;
        let (mut blocks, mut at) = (Vec::new(), (InodeId::NONE, 0));
        loop {
            let found = volume.content_after(at.0, at.1, ITEMS).map_err(|e| fault(&e))?;
            if let Some((ino, run)) = found.0 {
                let of = |k| (ino.0, run.file + k, run.arena, run.block + k);
                blocks.extend((0..run.len).map(of));
            }
            let Some(next) = found.1 else { break };
            at = next;
        }
        let (segment, at) = match self.random.below(8) {
            0 => (Segment::Tree, root * 4096 + self.random.below(4096)),
            _ if blocks.is_empty() => return Ok(()),
            what => {
                let at = self.random.below(blocks.len() as u64) as usize;
                let (ino, file, arena, block) = blocks[at];
                // Blocks that files share are one, and all of its owners may be asked for.
                let owners = blocks.iter().filter(|b| (b.2, b.3) == (arena, block)).count();
                if owners > 1 || !taken.insert((ino, file)) {
                    return Ok(());
                }
                match what {
                    1 => (Segment::Arena(arena), base + block * 8 + self.random.below(4)),
                    _ => (Segment::Arena(arena), block * 4096 + self.random.below(4096)),
                }
            }
        };
        self.trace(|| format!("DECAY node {} {segment:?} {at}", n + 1));
        *self.outcome.faults.entry("decay").or_default() += 1;
        let bit = 1u8 << self.random.below(8);
        let region = &self.hosts[n].region;
        let mut byte = [0];
        region.read(segment, at, &mut byte).map_err(|e| fault(&e))?;
        region.damage(segment, at, &[byte[0] ^ bit]).map_err(|e| fault(&e))
    }

    /// Every member has read all that it has, and mended what was rotten.
    pub(crate) fn is_mended(&self) -> bool {
        self.hosts.iter().filter_map(|host| host.node.as_ref()).all(|node| {
            let scrub = node.status().scrub;
            !scrub.running && scrub.rotten == 0
        })
    }

    /// How far they are.
    pub(crate) fn scrubs(&self) -> String {
        let of = |host: &Host| host.node.as_ref().map(|node| node.status().scrub);
        format!("{:?}", self.hosts.iter().map(of).collect::<Vec<_>>())
    }
}
