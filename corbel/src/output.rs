//! Results for people or for programs.

/// How results are printed.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// One JSON object on the last line instead of text.
    pub json: bool,
}

impl Output {
    /// Prints a result: the object, or what `text` prints.
    pub fn result(&self, object: &serde_json::Value, text: impl FnOnce()) {
        if self.json {
            println!("{object}");
        } else {
            text();
        }
    }

    /// Progress, for people only; on standard error so that results can be piped.
    pub fn step(&self, text: impl std::fmt::Display) {
        if !self.json {
            eprintln!("{text}");
        }
    }
}
