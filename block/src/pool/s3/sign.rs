//! Signatures of requests: AWS Signature Version 4, with the payload's hash in the signature.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ring::digest::{Context, SHA256, digest};
use ring::hmac;

/// Who asks.
#[derive(Clone)]
pub struct Keys {
    /// The access key.
    pub id: String,
    /// The secret key.
    pub secret: String,
    /// Of temporary keys.
    pub token: Option<String>,
    /// The region, a part of what is signed.
    pub region: String,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys").field("region", &self.region).finish_non_exhaustive()
    }
}

/// Hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SHA-256 of parts one after the other, in hexadecimal.
pub fn hash(parts: &[&[u8]]) -> String {
    let mut context = Context::new(&SHA256);
    parts.iter().for_each(|part| context.update(part));
    hex(context.finish().as_ref())
}

/// A path or a value of a query as it stands in a request and in what is signed; `/` stays where it may.
pub fn escape(text: &str, slash: bool) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut out, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte.into());
            }
            b'/' if slash => out.push('/'),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
        out
    })
}

/// A moment in the basic form of ISO 8601, `20130524T000000Z`.
pub fn stamp(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, rest) = (seconds / 86400, seconds % 86400);
    // Days since 0000-03-01 in eras of 400 years, whose years begin in March.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

/// What is signed of a request.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    /// GET, PUT, …
    pub method: &'a str,
    /// The path, escaped.
    pub path: &'a str,
    /// The query, escaped, sorted by name; each with `=`.
    pub query: &'a str,
    /// Headers that are signed: lower case, sorted; `host`, `x-amz-content-sha256` and `x-amz-date` among them.
    pub headers: &'a [(&'a str, &'a str)],
    /// The payload's hash, in hexadecimal.
    pub payload: &'a str,
    /// When: see [`stamp`].
    pub stamp: &'a str,
}

impl Keys {
    /// The value of the header `Authorization`.
    pub fn authorize(&self, signed: &Signed<'_>) -> String {
        let names: Vec<&str> = signed.headers.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        let mut request = format!("{}\n{}\n{}\n", signed.method, signed.path, signed.query);
        for (name, value) in signed.headers {
            let _ = writeln!(request, "{name}:{}", value.trim());
        }
        let _ = write!(request, "\n{names}\n{}", signed.payload);
        let day = signed.stamp.get(..8).unwrap_or_default();
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        let request = hex(digest(&SHA256, request.as_bytes()).as_ref());
        let text = format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{request}", signed.stamp);
        let mac = |key: &[u8], text: &str| {
            hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
        };
        let mut key = mac(format!("AWS4{}", self.secret).as_bytes(), day);
        for part in [self.region.as_str(), "s3", "aws4_request"] {
            key = mac(key.as_ref(), part);
        }
        let signature = hex(mac(key.as_ref(), &text).as_ref());
        let id = &self.id;
        format!(
            "AWS4-HMAC-SHA256 Credential={id}/{scope},SignedHeaders={names},Signature={signature}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of Amazon's documentation ("Examples: Signature Calculations in AWS Signature Version 4").
    #[test]
    fn the_documented_examples() {
        let keys = Keys {
            id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            token: None,
            region: "us-east-1".into(),
        };
        let (host, stamp) = ("examplebucket.s3.amazonaws.com", "20130524T000000Z");
        let (empty, welcome) = (hash(&[]), hash(&[b"Welcome to ", b"Amazon S3."]));
        let check = |method, path: &str, query, extra: &[(&str, &str)], payload: &str, expected| {
            let mut headers =
                vec![("host", host), ("x-amz-content-sha256", payload), ("x-amz-date", stamp)];
            headers.extend(extra);
            headers.sort_unstable();
            let signed = Signed { method, path, query, headers: &headers, payload, stamp };
            let header = keys.authorize(&signed);
            assert!(header.ends_with(&format!("Signature={expected}")), "{header}");
        };
        check(
            "GET",
            "/test.txt",
            "",
            &[("range", "bytes=0-9")],
            &empty,
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        );
        check(
            "PUT",
            &escape("/test$file.text", true),
            "",
            &[
                ("date", "Fri, 24 May 2013 00:00:00 GMT"),
                ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
            ],
            &welcome,
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        );
        check(
            "GET",
            "/",
            "lifecycle=",
            &[],
            &empty,
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        );
        check(
            "GET",
            "/",
            "max-keys=2&prefix=J",
            &[],
            &empty,
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        );
    }

    #[test]
    fn moments() {
        let at = |seconds| stamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101T000000Z");
        assert_eq!(at(1_369_353_600), "20130524T000000Z");
        assert_eq!(at(951_827_696), "20000229T123456Z");
        assert_eq!(at(4_107_542_399), "21000228T235959Z");
        assert_eq!(at(4_107_542_400), "21000301T000000Z");
    }
}
