//! How objects and images are named: `[USER@]POOL[/NAMESPACE[/PREFIX]]`, `[USER@]POOL[/NAMESPACE]/IMAGE`, both with options behind:
//! `?conf=FILE&reads=WHERE`.

use std::str::FromStr;

const FORM: &str = "[USER@]POOL[/NAMESPACE[/PREFIX]][?conf=FILE&reads=balance]";
const IMAGE_FORM: &str = "[USER@]POOL[/NAMESPACE]/IMAGE[?conf=FILE&reads=balance]";

/// Which of the OSDs that have an object are asked for what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Reads {
    /// The first one, which also takes what is written.
    #[default]
    Primary,
    /// Any of them, drawn anew for each request.
    Balance,
    /// The nearest one, by the `crush_location` of the configuration.
    Localize,
}

impl FromStr for Reads {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "primary" => Ok(Self::Primary),
            "balance" => Ok(Self::Balance),
            "localize" => Ok(Self::Localize),
            _ => Err(()),
        }
    }
}

/// Where objects are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Who asks, without `client.`; none: whom the configuration names, else `admin`.
    pub user: Option<String>,
    /// The pool.
    pub pool: String,
    /// The namespace; empty: the one without a name.
    pub namespace: String,
    /// What names begin with, with a slash behind it; or nothing.
    pub prefix: String,
    /// The file of configuration; none: the usual ones.
    pub conf: Option<String>,
    /// Whom reads ask.
    pub reads: Reads,
}

/// Reads what comes after the question mark. A file is all that is before the next option, whatever is in its name.
fn options(text: &str) -> Result<(Option<&str>, Reads), &'static str> {
    const WRONG: &str =
        "what comes after ? is not conf=FILE or reads=balance, localize or primary, each once";
    let (mut conf, mut reads) = (None, None);
    let mut rest = Some(text);
    while let Some(option) = rest {
        let next = ["&conf=", "&reads="].iter().filter_map(|next| option.find(next)).min();
        let (option, more) = match next {
            Some(at) => (&option[..at], Some(&option[at + 1..])),
            None => (option, None),
        };
        rest = more;
        match option.split_once('=') {
            Some(("conf", file)) if !file.is_empty() && conf.is_none() => conf = Some(file),
            Some(("reads", whom)) if reads.is_none() => {
                reads = Some(whom.parse::<Reads>().map_err(|()| WRONG)?);
            }
            _ => return Err(WRONG),
        }
    }
    Ok((conf, reads.unwrap_or_default()))
}

/// Cuts off what all forms have: the user, the configuration. What is left are parts between slashes.
fn parts<'a>(text: &'a str, form: &str) -> Result<(Place, Vec<&'a str>), String> {
    let wrong = |what: &str| format!("{text:?}: {what}: write {form}");
    let (rest, (conf, reads)) = match text.split_once('?') {
        Some((rest, behind)) => (rest, options(behind).map_err(wrong)?),
        None => (text, (None, Reads::Primary)),
    };
    let (user, rest) = match rest.split_once('@') {
        Some((user, rest)) => (Some(user.strip_prefix("client.").unwrap_or(user)), rest),
        None => (None, rest),
    };
    if user == Some("") {
        return Err(wrong("no user before @"));
    }
    // Else it would be of a name, and everything would lie elsewhere.
    if ["&conf=", "&reads="].iter().any(|option| rest.contains(option)) {
        return Err(wrong("the first option comes behind ?"));
    }
    if rest.contains(char::is_whitespace) || text.contains('\0') {
        return Err(wrong("a space in it"));
    }
    let parts: Vec<&str> = rest.split('/').collect();
    if parts[0].is_empty() {
        return Err(wrong("no pool"));
    }
    let place = Place {
        user: user.map(str::to_owned),
        pool: parts[0].to_owned(),
        namespace: String::new(),
        prefix: String::new(),
        conf: conf.map(str::to_owned),
        reads,
    };
    Ok((place, parts))
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (place, parts) = parts(text, FORM)?;
        let namespace = parts.get(1).copied().unwrap_or_default().to_owned();
        let mut prefix = String::new();
        for part in parts.iter().skip(2) {
            // Names of stores begin with no dot, and what does is not listed.
            if part.is_empty() || part.starts_with('.') {
                let what = "a part of its prefix is empty, or begins with a dot";
                return Err(format!("{text:?}: {what}: write {FORM}"));
            }
            prefix.extend([part, "/"]);
        }
        Ok(Self { namespace, prefix, ..place })
    }
}

/// Where an image of RBD is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImagePlace {
    /// Where its objects are.
    pub place: Place,
    /// Its name.
    pub image: String,
}

impl FromStr for ImagePlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (place, parts) = parts(text, IMAGE_FORM)?;
        let wrong = |what: &str| format!("{text:?}: {what}: write {IMAGE_FORM}");
        let (namespace, image) = match parts[1..] {
            [image] => ("", image),
            [namespace, image] => (namespace, image),
            [] => return Err(wrong("no image")),
            _ => return Err(wrong("too many slashes")),
        };
        if image.is_empty() {
            return Err(wrong("no image"));
        }
        if image.contains('@') {
            return Err(wrong("snapshots are not served"));
        }
        let place = Place { namespace: namespace.to_owned(), ..place };
        Ok(Self { place, image: image.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read() {
        let place: Place = "vm@fast/ns/a/b?conf=/etc/other.conf".parse().unwrap();
        let told = (place.user.as_deref(), place.pool.as_str(), place.namespace.as_str());
        assert_eq!(told, (Some("vm"), "fast", "ns"));
        assert_eq!(
            (place.prefix.as_str(), place.conf.as_deref()),
            ("a/b/", Some("/etc/other.conf"))
        );
        let place: Place = "fast//a".parse().unwrap();
        assert_eq!((place.namespace.as_str(), place.prefix.as_str()), ("", "a/"));
        assert_eq!("client.x@p".parse::<Place>().unwrap().user.as_deref(), Some("x"));
        for bad in [
            "",
            "/ns",
            "@p",
            "p&reads=balance",
            "p/n&conf=f",
            "p?x",
            "p?conf=",
            "p/n//a",
            "p/n/.a",
            "p/n/a/",
            "a b",
        ] {
            let error = bad.parse::<Place>().unwrap_err();
            assert!(error.contains("write ["), "{error}");
        }
    }

    #[test]
    fn whom_reads_ask_is_read() {
        let read = |text: &str| -> Result<(Option<String>, Reads), String> {
            text.parse::<Place>().map(|place| (place.conf, place.reads))
        };
        let file = |name: &str| Some(name.to_owned());
        assert_eq!(read("p"), Ok((None, Reads::Primary)));
        assert_eq!(read("p?reads=balance"), Ok((None, Reads::Balance)));
        assert_eq!(read("p?conf=/a&reads=localize"), Ok((file("/a"), Reads::Localize)));
        assert_eq!(read("p/n?reads=primary&conf=/a&b=c"), Ok((file("/a&b=c"), Reads::Primary)));
        for bad in [
            "p?",
            "p?reads=",
            "p?reads=any",
            "p?reads=balance&",
            "p?reads=balance&reads=balance",
            "p?conf=a&conf=b",
            "p?conf=&reads=balance",
            "p?Reads=balance",
        ] {
            let error = read(bad).unwrap_err();
            assert!(error.contains("reads=balance"), "{error}");
        }
        let image: ImagePlace = "rbd/disk?reads=balance".parse().unwrap();
        assert_eq!((image.place.reads, image.image.as_str()), (Reads::Balance, "disk"));
    }

    #[test]
    fn images_are_read() {
        let at: ImagePlace = "rbd/disk".parse().unwrap();
        assert_eq!((at.place.namespace.as_str(), at.image.as_str()), ("", "disk"));
        let at: ImagePlace = "me@rbd/ns/disk?conf=c".parse().unwrap();
        assert_eq!((at.place.namespace.as_str(), at.image.as_str()), ("ns", "disk"));
        for bad in ["rbd", "rbd/", "rbd/a/b/c", "/a", "a/b@snap@", "u@p/a@s"] {
            assert!(bad.parse::<ImagePlace>().is_err(), "{bad}");
        }
    }
}
