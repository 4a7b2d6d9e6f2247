//! Users and groups of a guest and of its host: rules as virtiofsd has them (`--translate-uid`, `--translate-gid`).

use std::str::FromStr;

use base::Errno;

/// One rule: numbers from `from` on, `count` of them, become those from `to` on; or all of them become `to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    from: u32,
    to: u32,
    count: u32,
    squash: bool,
    forbid: bool,
}

impl Range {
    fn has(&self, id: u32) -> bool {
        id >= self.from && id - self.from < self.count
    }

    fn overlaps(&self, other: &Self) -> bool {
        let end = |r: &Self| u64::from(r.from) + u64::from(r.count);
        u64::from(self.from) < end(other) && u64::from(other.from) < end(self)
    }
}

/// A rule as it is written: `TYPE:SOURCE:TARGET:COUNT`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    to_host: Option<Range>,
    to_guest: Option<Range>,
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let kind = parts.next().unwrap_or_default();
        let numbers: Vec<u32> = parts
            .map(|n| n.parse().map_err(|_| format!("{text}: {n:?} is no number up to 2^32 - 1")))
            .collect::<Result<_, _>>()?;
        let range = |squash: bool, forbid: bool| {
            let (from, to, count) = match (&*numbers, forbid) {
                ([from, to, count], false) => (*from, *to, *count),
                ([from, count], true) => (*from, 0, *count),
                _ => {
                    let form = if forbid { "SOURCE:COUNT" } else { "SOURCE:TARGET:COUNT" };
                    return Err(format!("{text}: it is {kind}:{form}"));
                }
            };
            let last = u64::from(u32::MAX) + 1;
            let past = |at: u32| u64::from(at) + u64::from(count) > last;
            if count == 0 || past(from) || !squash && past(to) {
                return Err(format!("{text}: a range that is empty, or past 2^32 - 1"));
            }
            Ok(Range { from, to, count, squash, forbid })
        };
        match kind {
            "guest" => Ok(Self { to_host: Some(range(false, false)?), to_guest: None }),
            "host" => Ok(Self { to_host: None, to_guest: Some(range(false, false)?) }),
            "squash-guest" => Ok(Self { to_host: Some(range(true, false)?), to_guest: None }),
            "squash-host" => Ok(Self { to_host: None, to_guest: Some(range(true, false)?) }),
            "forbid-guest" => Ok(Self { to_host: Some(range(true, true)?), to_guest: None }),
            "map" => {
                let there = range(false, false)?;
                let back = Range { from: there.to, to: there.from, ..there };
                Ok(Self { to_host: Some(there), to_guest: Some(back) })
            }
            _ => Err(format!(
                "{text}: no kind {kind:?}; there are guest, host, squash-guest, squash-host, forbid-guest and map"
            )),
        }
    }
}

/// All rules for users, or for groups. What none names stays the same.
#[derive(Clone, Debug, Default)]
pub struct IdMap {
    to_host: Vec<Range>,
    to_guest: Vec<Range>,
}

impl IdMap {
    /// The map that these rules make.
    ///
    /// # Errors
    /// Two of them are about the same number.
    pub fn new(rules: &[Rule]) -> Result<Self, String> {
        let mut map = Self::default();
        for rule in rules {
            for (ranges, range) in
                [(&mut map.to_host, rule.to_host), (&mut map.to_guest, rule.to_guest)]
            {
                let Some(range) = range else { continue };
                if let Some(other) = ranges.iter().find(|other| other.overlaps(&range)) {
                    let (a, b) = (other.from.max(range.from), range.from);
                    return Err(format!(
                        "two rules say what becomes of {a} (the second from {b} on)"
                    ));
                }
                ranges.push(range);
            }
        }
        Ok(map)
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.to_host.is_empty() && self.to_guest.is_empty()
    }

    fn apply(ranges: &[Range], id: u32) -> Option<u32> {
        match ranges.iter().find(|range| range.has(id)) {
            None => Some(id),
            Some(range) if range.forbid => None,
            Some(range) if range.squash => Some(range.to),
            Some(range) => Some(range.to + (id - range.from)),
        }
    }

    /// The host's number for one of the guest's.
    ///
    /// # Errors
    /// EPERM: it must not be used.
    pub fn host(&self, id: u32) -> Result<u32, Errno> {
        Self::apply(&self.to_host, id).ok_or(Errno::PERM)
    }

    /// The guest's number for one of the host's.
    pub fn guest(&self, id: u32) -> u32 {
        Self::apply(&self.to_guest, id).unwrap_or(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rules: &[&str]) -> Result<IdMap, String> {
        IdMap::new(&rules.iter().map(|r| r.parse()).collect::<Result<Vec<_>, _>>()?)
    }

    #[test]
    fn rules_are_virtiofsds() {
        let map =
            map(&["map:0:100000:65536", "squash-host:0:65534:1", "forbid-guest:70000:10"]).unwrap();
        assert_eq!((map.host(0), map.host(65_535)), (Ok(100_000), Ok(165_535)));
        assert_eq!((map.host(65_536), map.host(70_005)), (Ok(65_536), Err(Errno::PERM)));
        assert_eq!((map.guest(100_000), map.guest(165_535)), (0, 65_535));
        assert_eq!((map.guest(0), map.guest(9)), (65_534, 9));
        let all = "squash-guest:0:1001:4294967295";
        assert_eq!(IdMap::new(&[all.parse().unwrap()]).unwrap().host(77), Ok(1001));
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for rule in [
            "",
            "map",
            "map:0:1",
            "map:0:1:0",
            "map:0:4294967295:2",
            "x:0:1:1",
            "map:a:1:1",
            "map:-1:1:1",
            "forbid-guest:1:2:3",
            "map:0:1:1:1",
        ] {
            assert!(rule.parse::<Rule>().is_err(), "{rule}");
        }
        assert!(map(&["map:0:1000:10", "guest:9:0:1"]).is_err());
        assert!(map(&["map:0:1000:10", "guest:10:0:1"]).is_ok());
        assert!(map(&[]).unwrap().is_empty());
    }
}
