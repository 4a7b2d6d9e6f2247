//! Memory behind something that a test looks at: what it does not look at goes to the `region` behind it. (All of it: a method
//! with a default that stayed here would say another thing than that region.)

/// The named methods of [`Media`](storage::media::Media), passed on to `self.region`.
macro_rules! pass_on {
    ($($method:ident)+) => { $(crate::pass_on::pass_on!(@ $method);)+ };
    (@ $name:ident($($arg:ident: $type:ty),*) -> $of:ty) => {
        fn $name(&self, $($arg: $type),*) -> Result<$of, storage::media::MediaError> {
            self.region.$name($($arg),*)
        }
    };
    (@ size) => { crate::pass_on::pass_on!(@ size(segment: Segment) -> u64); };
    (@ read) => { crate::pass_on::pass_on!(@ read(segment: Segment, offset: u64, buf: &mut [u8]) -> ()); };
    (@ write) => { crate::pass_on::pass_on!(@ write(segment: Segment, offset: u64, data: &[u8]) -> ()); };
    (@ persist) => { crate::pass_on::pass_on!(@ persist(segment: Segment, offset: u64, len: u64) -> ()); };
    (@ fence) => { crate::pass_on::pass_on!(@ fence() -> ()); };
    (@ load64) => { crate::pass_on::pass_on!(@ load64(segment: Segment, offset: u64) -> u64); };
    (@ store64) => { crate::pass_on::pass_on!(@ store64(segment: Segment, offset: u64, value: u64) -> ()); };
    (@ cas64) => {
        crate::pass_on::pass_on!(@ cas64(segment: Segment, offset: u64, expect: u64, value: u64) -> u64);
    };
    (@ copy) => { crate::pass_on::pass_on!(@ copy(from: (Segment, u64), to: (Segment, u64), len: u64) -> ()); };
    (@ room) => {
        crate::pass_on::pass_on!(@ back(ranges: &[(Segment, u64, u64)]) -> ());
        crate::pass_on::pass_on!(@ spare() -> Option<storage::media::Spare>);
        crate::pass_on::pass_on!(@ taken_from(offset: u64) -> u64);
        crate::pass_on::pass_on!(@ discard(segment: Segment, offset: u64, len: u64) -> ());
    };
    (@ segments) => {
        crate::pass_on::pass_on!(@ ensure(segment: Segment, size: u64) -> ());
        crate::pass_on::pass_on!(@ mend(segment: Segment, size: u64) -> bool);
        crate::pass_on::pass_on!(@ leave(log: Segment, user: u32, bytes: u64) -> bool);
        crate::pass_on::pass_on!(@ look_at_left() -> std::collections::BTreeMap<u32, usize>);
        crate::pass_on::pass_on!(@ remove(segment: Segment) -> ());
        crate::pass_on::pass_on!(@ segments() -> Vec<Segment>);
        crate::pass_on::pass_on!(@ wake(segment: Segment, offset: u64) -> ());
    };
}

pub(crate) use pass_on;
