//! Libraries of C that are loaded when they are needed: a program builds and runs without them, and who uses nothing of one need not
//! have it.
#![allow(unsafe_code)] // they are C's

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// One, and what is said of it.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    /// Its file, by the name that stands for its interface.
    pub name: &'static CStr,
    /// How people call it.
    pub title: &'static str,
    /// What one is that lacks a function.
    pub lacking: &'static str,
    /// What to do where it is missing.
    pub remedy: &'static str,
}

/// One that is loaded, and stays.
#[derive(Clone, Copy, Debug)]
pub struct Loaded {
    library: Library,
    handle: NonNull<c_void>,
}

impl Library {
    /// Loads it.
    ///
    /// # Errors
    /// It is not there; with what to do.
    pub fn load(self) -> Result<Loaded, String> {
        // SAFETY: the name ends in NUL. What the library does when it is loaded is its own.
        let handle = unsafe { libc::dlopen(self.name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let handle = NonNull::new(handle).ok_or_else(|| {
            // SAFETY: the text, if there is one, ends in NUL and is this thread's.
            let said = unsafe { libc::dlerror() };
            let said = match said.is_null() {
                true => self.name.to_string_lossy(),
                // SAFETY: as above.
                false => unsafe { CStr::from_ptr(said) }.to_string_lossy(),
            };
            format!("{} cannot be loaded ({said}): {}", self.title, self.remedy)
        })?;
        Ok(Loaded { library: self, handle })
    }
}

impl Loaded {
    /// Where a function of it is.
    ///
    /// # Errors
    /// It has none of that name; with what to do.
    pub fn symbol(&self, name: &CStr) -> Result<NonNull<c_void>, String> {
        // SAFETY: the library is never unloaded, and the name ends in NUL.
        let at = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        NonNull::new(at).ok_or_else(|| {
            let Library { name: file, lacking, remedy, .. } = self.library;
            let (file, name) = (file.to_string_lossy(), name.to_string_lossy());
            format!("{file} has no {name}: {lacking}: {remedy}")
        })
    }
}

/// Declares a type with a field for each function of a library that is used, and its `find`, which looks them up in one that is loaded.
/// Whoever declares them vouches that they are declared so in C: name the version.
#[macro_export]
macro_rules! library_functions {
    (
        $(#[$doc:meta])*
        $vis:vis struct $name:ident;
        $($field:ident: $symbol:literal, fn($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*
    ) => {
        $(#[$doc])*
        $vis struct $name {
            // SAFETY: who calls one gives it what the library's documentation of it asks for.
            $($vis $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl $name {
            fn find(library: &$crate::library::Loaded) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        let at = library.symbol($symbol)?.as_ptr();
                        // SAFETY: the symbol is the function of that name, whose declaration in C is this one.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $ret)?,
                            >(at)
                        }
                    },)*
                })
            }
        }
    };
}
