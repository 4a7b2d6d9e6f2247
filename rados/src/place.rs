//! How objects and images are named: `[USER@]POOL[/NAMESPACE[/PREFIX]][?conf=FILE]`, `[USER@]POOL[/NAMESPACE]/IMAGE[?conf=FILE]`.

use std::str::FromStr;

const FORM: &str = "[USER@]POOL[/NAMESPACE[/PREFIX]][?conf=FILE]";
const IMAGE_FORM: &str = "[USER@]POOL[/NAMESPACE]/IMAGE[?conf=FILE]";

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
}

/// Cuts off what all forms have: the user, the configuration. What is left are parts between slashes.
fn parts<'a>(text: &'a str, form: &str) -> Result<(Place, Vec<&'a str>), String> {
    let wrong = |what: &str| format!("{text:?}: {what}: write {form}");
    let (rest, conf) = match text.split_once('?') {
        Some((rest, options)) => {
            let conf = options.strip_prefix("conf=").filter(|file| !file.is_empty());
            (rest, Some(conf.ok_or_else(|| wrong("what comes after ? is not conf=FILE"))?))
        }
        None => (text, None),
    };
    let (user, rest) = match rest.split_once('@') {
        Some((user, rest)) => (Some(user.strip_prefix("client.").unwrap_or(user)), rest),
        None => (None, rest),
    };
    if user == Some("") {
        return Err(wrong("no user before @"));
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
        for bad in ["", "/ns", "@p", "p?x", "p?conf=", "p/n//a", "p/n/.a", "p/n/a/", "a b"] {
            let error = bad.parse::<Place>().unwrap_err();
            assert!(error.contains("write ["), "{error}");
        }
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
