//! The language of scripts, which is also what a worker is told: one call a line, tokens between
//! blanks. Names may hold any bytes; those that would not survive a line are written `%xx`, and a
//! byte repeated N times as `{c*N}`.

use std::fmt::Write as _;

/// From this length on a run of one byte is written short.
const RUN: usize = 12;

/// A token for any bytes; the empty string is `''`.
pub fn escape(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "''".into();
    }
    let mut out = String::new();
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        let run = bytes[at..].iter().take_while(|b| **b == byte).count();
        if run >= RUN {
            out.push('{');
            escape_byte(&mut out, byte);
            let _ = write!(out, "*{run}}}");
            at += run;
        } else {
            escape_byte(&mut out, byte);
            at += 1;
        }
    }
    out
}

fn escape_byte(out: &mut String, byte: u8) {
    if byte.is_ascii_alphanumeric() || b"_./+-".contains(&byte) {
        out.push(char::from(byte));
    } else {
        let _ = write!(out, "%{byte:02x}");
    }
}

/// The bytes of a token.
pub fn unescape(token: &str) -> Option<Vec<u8>> {
    if token == "''" {
        return Some(Vec::new());
    }
    let mut out = Vec::new();
    let mut rest = token;
    while !rest.is_empty() {
        if let Some(run) = rest.strip_prefix('{') {
            let (inside, after) = run.split_once('}')?;
            let (byte, count) = inside.rsplit_once('*')?;
            let byte = unescape(byte).filter(|b| b.len() == 1)?[0];
            let count: usize = count.parse().ok().filter(|n| *n <= 1 << 16)?;
            out.extend(std::iter::repeat_n(byte, count));
            rest = after;
        } else if let Some(code) = rest.strip_prefix('%') {
            out.push(u8::from_str_radix(code.get(..2)?, 16).ok()?);
            rest = &code[2..];
        } else {
            let c = rest.chars().next().filter(char::is_ascii)?;
            out.push(c as u8);
            rest = &rest[1..];
        }
    }
    Some(out)
}

/// Names of bits, as in `rdwr|creat|0x40`.
pub fn bits(token: &str, table: &[(&str, i64)]) -> Option<i64> {
    if token == "-" {
        return Some(0);
    }
    token.split('|').try_fold(0, |sum, name| {
        let known = table.iter().find(|(n, _)| *n == name).map(|(_, bit)| *bit);
        Some(sum | known.or_else(|| number(name))?)
    })
}

/// A number: decimal, `0x…`, or octal with a leading `0`.
pub fn number(token: &str) -> Option<i64> {
    if let Some(hex) = token.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok().map(u64::cast_signed);
    }
    match token.strip_prefix('0') {
        Some("") => Some(0),
        Some(octal) => i64::from_str_radix(octal, 8).ok(),
        None => token.parse().ok(),
    }
}

/// The value of `key=value` among tokens.
pub fn field<'a>(tokens: &[&'a str], key: &str) -> Option<&'a str> {
    tokens.iter().find_map(|token| token.strip_prefix(key)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_survive() {
        for name in [
            &b"a/b.c"[..],
            b"",
            b"''",
            b"%",
            b"{a*3}",
            b" \n\t\xff\x80",
            &[b'x'; 255],
            &[b'%'; 40],
            &[b'{'; 12],
            &[0xff; 13],
        ] {
            let token = escape(name);
            assert!(!token.contains(' ') && !token.contains('\n'), "{token}");
            let back = unescape(&token).unwrap();
            // Two quotes are the empty name; a name of two quotes is written otherwise.
            assert_eq!(back, name, "{token}");
        }
        assert_eq!(escape(&[b'n'; 200]), "{n*200}");
        for bad in ["{", "{a}", "{ab*2}", "{a*x}", "{a*99999999}", "%", "%1", "%zz", "ä"] {
            assert_eq!(unescape(bad), None, "{bad}");
        }
    }

    #[test]
    fn numbers_and_bits() {
        assert_eq!(number("0644"), Some(0o644));
        assert_eq!(number("0"), Some(0));
        assert_eq!(number("-12"), Some(-12));
        assert_eq!(number("0x10"), Some(16));
        assert_eq!(number("x"), None);
        let table = [("a", 1), ("b", 4)];
        assert_eq!(bits("a|b", &table), Some(5));
        assert_eq!(bits("-", &table), Some(0));
        assert_eq!(bits("a|0x10", &table), Some(17));
        assert_eq!(bits("c", &table), None);
    }
}
