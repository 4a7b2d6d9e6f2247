//! The C library against the bare cost of persisting, and an unmodified binary against the library.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::load::figures;
use super::steady::{p50, turns};
use super::world::World;
use super::{Bench, Measured, built, load};
use crate::failure::{Failure, Kind, Result};

/// How much dearer than the bare cost a durable write may be.
const WRITE_LOCAL_FACTOR: f64 = 2.5;
/// The C library.
const LIBRARY: &str = "libcorbel.so";
const HEADER: &str = include_str!("../../../capi/include/corbel.h");

/// The folder of libcorbel.so: beside this program (cargo), or where packages put it.
fn library_dir() -> Result<PathBuf> {
    let own = crate::local::own_program()?;
    let beside = own.parent().unwrap_or(Path::new("/")).to_path_buf();
    let candidates = [beside.clone(), beside.join("../lib"), "/usr/lib/corbel".into()];
    candidates.into_iter().find(|dir| dir.join(LIBRARY).exists()).ok_or_else(|| {
        Failure::new(
            Kind::Environment,
            format!("no {LIBRARY} in {}", beside.display()),
            "build it beside this program: cargo build --release -p capi",
        )
    })
}

/// The load program, compiled against the C library.
fn compile(dir: &Path) -> Result<PathBuf> {
    let libraries = library_dir()?;
    built::capi(&libraries.join(LIBRARY))?;
    std::fs::write(dir.join("corbel.h"), HEADER).map_err(|e| Failure::io(dir.display(), &e))?;
    let (source, program) = (dir.join("load.c"), dir.join("load-library"));
    let search = format!("-L{}", libraries.display());
    let find = format!("-Wl,-rpath,{}", libraries.display());
    let include = format!("-I{}", dir.display());
    let options = ["-O2", "-DCORBEL_LIBRARY", &include, &search, &find, "-o"];
    load::cc(&options, &[&program, &source], &["-lcorbel"])?;
    Ok(program)
}

fn library(world: &World, program: &Path, args: &[&str]) -> Result<Command> {
    let mut command = Command::new(program);
    command.args(args).env("CORBEL_SOCKET", world.local.config(1)?.node.socket);
    Ok(command)
}

/// Bare cost of persisting 4 KiB and a header, in nanoseconds.
fn bare_persist(world: &World) -> Result<f64> {
    let ring = world.scratch().join("ring").display().to_string();
    p50(&figures(world.bare(&["persist", &ring, "4096", "20000"]))?)
}

/// 4 KiB durable write through the C library.
pub fn write_local(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[])?;
    let program = compile(world.scratch())?;
    let [bare, library] = turns(|| {
        let bare = bare_persist(&world)?;
        let args = ["write", "/write-local", "4096", "20000"];
        Ok([bare, p50(&figures(library(&world, &program, &args)?)?)?])
    })?;
    Ok(vec![
        ("p50_us", library / 1e3),
        ("limit_us", bare * WRITE_LOCAL_FACTOR / 1e3),
        ("ratio", library / bare),
        ("bare_us", bare / 1e3),
        ("replicas", f64::from(bench.replicas)),
    ])
}

/// The same by an unmodified binary.
pub fn write_run(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let program = compile(world.scratch())?;
    let path = world.file(1, "write-run");
    let [run, library] = turns(|| {
        let args = ["write", path.as_str(), "4096", "20000"];
        let run = p50(&figures(world.under_run(1, &args)?)?)?;
        let args = ["write", "/write-library", "4096", "20000"];
        Ok([run, p50(&figures(library(&world, &program, &args)?)?)?])
    })?;
    Ok(vec![
        ("p50_us", run / 1e3),
        ("library_p50_us", library / 1e3),
        ("extra_ns", run - library),
        ("replicas", f64::from(bench.replicas)),
    ])
}
