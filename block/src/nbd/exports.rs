//! What a server offers, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::proto::NAME_MAX;
use crate::device::Device;

/// One export.
#[derive(Clone)]
pub struct Export {
    /// For people; at most [`NAME_MAX`] bytes.
    pub description: String,
    /// What is behind it.
    pub device: Arc<dyn Device>,
    /// Whether a flush on one connection covers what others wrote: then a client may use several.
    pub multi_conn: bool,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("description", &self.description).finish_non_exhaustive()
    }
}

/// Exports by name. The empty name means the only one, or the one that is called so.
#[derive(Clone, Debug, Default)]
pub struct Exports(BTreeMap<String, Export>);

impl Exports {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an export; an error says why that cannot be.
    pub fn add(&mut self, name: &str, export: Export) -> Result<(), String> {
        if name.len() > NAME_MAX || export.description.len() > NAME_MAX {
            return Err(format!("an export's name and description have at most {NAME_MAX} bytes"));
        }
        if name.chars().any(char::is_control) {
            return Err(format!("export {name:?}: a name has no control characters"));
        }
        if self.0.contains_key(name) {
            return Err(format!("export {name:?} is named twice"));
        }
        self.0.insert(name.to_owned(), export);
        Ok(())
    }

    /// The export that a client means, and its own name.
    pub fn find(&self, name: &[u8]) -> Option<(&str, &Export)> {
        let name = std::str::from_utf8(name).ok()?;
        let found = self.0.get_key_value(name);
        let only = || self.0.iter().next().filter(|_| name.is_empty() && self.0.len() == 1);
        found.or_else(only).map(|(name, export)| (name.as_str(), export))
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Export)> {
        self.0.iter().map(|(name, export)| (name.as_str(), export))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
