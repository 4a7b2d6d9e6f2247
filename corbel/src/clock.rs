//! Moments of the calendar, in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::OffsetDateTime;

/// A moment by seconds since 1970; what lies beyond the calendar is 1970.
pub fn moment(seconds: i64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// A moment by nanoseconds since 1970, as RFC 3339 writes it: to the second.
pub fn rfc3339(nanos: u64) -> String {
    format!("{}Z", to_the_second(Duration::from_nanos(nanos)))
}

/// Now, as RFC 3339 writes it: to the microsecond.
pub fn rfc3339_now() -> String {
    rfc3339_micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn rfc3339_micros(since_1970: Duration) -> String {
    format!("{}.{:06}Z", to_the_second(since_1970), since_1970.subsec_micros())
}

fn to_the_second(since_1970: Duration) -> String {
    let at = moment(i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX));
    let (month, day) = (u8::from(at.month()), at.day());
    let (hour, minute, second) = (at.hour(), at.minute(), at.second());
    format!("{:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}", at.year())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_so_that_they_sort() {
        let at = Duration::new(1_796_006_129, 42_000_999);
        assert_eq!(rfc3339_micros(at), "2026-11-30T02:35:29.042000Z");
        assert_eq!(rfc3339(at.as_nanos() as u64), "2026-11-30T02:35:29Z");
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert!(rfc3339_now().as_str() > "2026-");
    }
}
