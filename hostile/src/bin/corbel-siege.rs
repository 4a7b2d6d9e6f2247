//! `corbel-siege DIR [--only NAME]... [--json]`: all attacks of a local user on the cluster in DIR (as `corbel cluster up --dir
//! DIR` makes it, with mounts), as root. Prints each, and in the end `{"attacks", "succeeded", "untried"}`; the exit code is
//! 1 if one succeeded or could not be tried.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use hostile::siege::{Ground, Outcome, attacks, root};

fn main() -> ExitCode {
    base::output::end_where_it_ends("corbel-siege");
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        // What the siege starts as the stranger.
        ["--attack", name, cluster, ground] => one(name, Path::new(cluster), ground),
        ["--list"] => {
            for attack in attacks() {
                println!("{:24} {}", attack.name, attack.tries);
            }
            ExitCode::SUCCESS
        }
        [cluster, ref rest @ ..] if !cluster.starts_with('-') => all(Path::new(cluster), rest),
        _ => {
            eprintln!(
                "corbel-siege DIR [--only NAME]...   attacks the cluster in DIR, as root\ncorbel-siege --list"
            );
            ExitCode::from(2)
        }
    }
}

fn one(name: &str, cluster: &Path, ground: &str) -> ExitCode {
    let Some(attack) = attacks().into_iter().find(|a| a.name == name) else {
        println!("untried no attack is called {name}");
        return ExitCode::from(2);
    };
    let line = match (attack.body)(&Ground::new(cluster, ground)) {
        Ok(Outcome::Held(saw)) => format!("held {saw}"),
        Ok(Outcome::Succeeded(saw)) => format!("succeeded {saw}"),
        Err(why) => format!("untried {why}"),
    };
    println!("{}", line.replace('\n', " "));
    ExitCode::SUCCESS
}

fn all(cluster: &Path, rest: &[&str]) -> ExitCode {
    let only: Vec<&str> = rest.iter().copied().filter(|word| !word.starts_with("--")).collect();
    if let Err(e) = root::open_doors(cluster) {
        eprintln!("corbel-siege: {}: {e}", cluster.display());
        return ExitCode::from(2);
    }
    // The stranger has to reach the program.
    let place = cluster.join("siege");
    let program: PathBuf = place.join("corbel-siege");
    let copied = std::fs::create_dir_all(&place)
        .and_then(|()| std::fs::copy(std::env::current_exe()?, &program))
        .and_then(|_| {
            let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(&program, open)?;
            std::fs::set_permissions(&place, std::os::unix::fs::PermissionsExt::from_mode(0o711))
        });
    if let Err(e) = copied {
        eprintln!("corbel-siege: {}: {e}", program.display());
        return ExitCode::from(2);
    }
    let (mut tried, mut succeeded, mut untried) = (0, 0, 0);
    for attack in attacks().into_iter().filter(|a| only.is_empty() || only.contains(&a.name)) {
        let ended = root::run(attack, cluster, &program);
        tried += 1;
        let line = match ended.outcome {
            Ok(Outcome::Held(saw)) => format!("held       {saw}"),
            Ok(Outcome::Succeeded(saw)) => {
                succeeded += 1;
                format!("SUCCEEDED  {saw}")
            }
            Err(why) => {
                untried += 1;
                format!("UNTRIED    {why}")
            }
        };
        println!("{:24} {line:.300}", attack.name);
    }
    println!("{{\"attacks\":{tried},\"succeeded\":{succeeded},\"untried\":{untried}}}");
    ExitCode::from(u8::from(succeeded + untried > 0))
}
