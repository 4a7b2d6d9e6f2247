//! Whether the libraries that benches load into programs are of the sources of this program: cargo builds each of the three by
//! itself, and figures of one that was left behind are figures of nothing.

use std::path::Path;
use std::sync::OnceLock;

use base::note::Note;

use crate::failure::{Failure, Kind, Result};
use crate::run;

/// Refuses what `corbel run` would load, if it is of other sources. (It is looked at once.)
pub fn intercept() -> Result<()> {
    static LOOKED_AT: OnceLock<Result<()>> = OnceLock::new();
    let look = || is_of(&run::find_library()?, env!("CORBEL_INTERCEPT_OF"));
    LOOKED_AT.get_or_init(look).clone()
}

/// The same of the C library.
pub fn capi(library: &Path) -> Result<()> {
    is_of(library, env!("CORBEL_CAPI_OF"))
}

fn is_of(library: &Path, sources: &str) -> Result<()> {
    let bytes = std::fs::read(library).map_err(|e| Failure::io(library.display(), &e))?;
    let says = Note::find(&bytes);
    if says == Some(sources) {
        return Ok(());
    }
    let says = says.map_or("says nothing of its sources".into(), |says| {
        format!("is built of other sources than this program ({says}, not {sources})")
    });
    let release = if cfg!(debug_assertions) { "" } else { " --release" };
    Err(Failure::new(
        Kind::Environment,
        format!("{}: {says}", library.display()),
        format!(
            "build all of it: cargo build{release} -p corbel -p capi && cargo build{release} -p intercept"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_of_other_sources_is_refused_with_the_command_that_mends_it() {
        // No library at all, and this program, which says nothing.
        let own = std::env::current_exe().expect("this program");
        for library in [Path::new("/dev/null"), &own] {
            let failure = is_of(library, "0123456789abcdef").expect_err("it is not of these");
            assert_eq!(failure.kind, Kind::Environment);
            assert!(failure.message.contains(&library.display().to_string()), "{failure}");
            assert!(failure.remedy.contains("-p corbel -p capi && cargo build"), "{failure}");
        }
        assert!(is_of(Path::new("/nowhere"), "").is_err());
    }
}
