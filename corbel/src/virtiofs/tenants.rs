//! Devices of several tenants in one process: the file that `--tenants` names. Each table `[[tenant]]` is a command line of
//! `corbel virtiofs`: so a tenant has every option that a device alone has, by the same name and with the same meaning.

use std::ffi::OsString;
use std::path::Path;

use clap::Parser;

use super::{VirtiofsArgs, usage};
use crate::failure::{Context, Result};

/// Options of the process, which is one for all.
const OF_ALL: &[&str] = &[
    "fd",
    "like-virtiofsd",
    "listen",
    "metrics",
    "once",
    "print-capabilities",
    "remote",
    "rlimit-nofile",
    "sandbox",
    "seccomp",
    "tenants",
    "threads-at-once",
];

#[derive(Parser, Debug)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Line {
    #[command(flatten)]
    args: VirtiofsArgs,
}

/// Reads the file.
pub(super) fn read(file: &Path) -> Result<Vec<VirtiofsArgs>> {
    let text = std::fs::read_to_string(file).context(file.display())?;
    parse(&text).map_err(|error| usage(format!("{}: {error}", file.display())))
}

fn parse(text: &str) -> std::result::Result<Vec<VirtiofsArgs>, String> {
    let table: toml::Table = toml::from_str(text).map_err(|e| e.to_string())?;
    if let Some(key) = table.keys().find(|key| *key != "tenant") {
        return Err(format!("{key}: there are only tables [[tenant]]"));
    }
    let Some(toml::Value::Array(tables)) = table.get("tenant") else {
        return Err("no table [[tenant]]".into());
    };
    let mut all: Vec<VirtiofsArgs> = Vec::new();
    for (number, table) in (1..).zip(tables) {
        let toml::Value::Table(keys) = table else {
            return Err(format!("tenant {number}: no table"));
        };
        let args = one(keys).map_err(|error| format!("tenant {number}: {error}"))?;
        if let Some(other) = all.iter().find(|other| other.socket_path == args.socket_path) {
            return Err(format!("tenant {number}: the socket is that of {}", other.tenant));
        }
        if let Some((before, _)) = (1..).zip(&all).find(|(_, other)| other.tenant == args.tenant) {
            let name = &args.tenant;
            return Err(format!(
                "tenant {number}: is called {name}, as tenant {before} is: its logs and figures would be taken for the other's; \
                 say who it is with tenant = \"NAME\""
            ));
        }
        if args.state.is_some()
            && let Some(other) = all.iter().find(|other| other.state == args.state)
        {
            return Err(format!("tenant {number}: the state is that of {}", other.tenant));
        }
        all.push(args);
    }
    Ok(all)
}

fn one(keys: &toml::Table) -> std::result::Result<VirtiofsArgs, String> {
    let mut line: Vec<OsString> = Vec::new();
    for (key, value) in keys {
        if OF_ALL.contains(&key.as_str()) {
            return Err(format!("{key}: of the whole process, and so on its command line"));
        }
        let name = format!("--{key}");
        let mut add = |value: &toml::Value| {
            match value {
                toml::Value::Boolean(true) => line.push(name.clone().into()),
                toml::Value::Boolean(false) => {}
                toml::Value::Integer(number) => line.push(format!("{name}={number}").into()),
                toml::Value::String(text) => line.push(format!("{name}={text}").into()),
                other => return Err(format!("{key}: {} is no option", other.type_str())),
            }
            Ok(())
        };
        match value {
            toml::Value::Array(values) => values.iter().try_for_each(add)?,
            value => add(value)?,
        }
    }
    let line = Line::try_parse_from(line).map_err(|error| {
        // Without the usage of a command line, which this is not.
        let text = error.to_string();
        let said = text.lines().map(str::trim).take_while(|line| !line.is_empty());
        said.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
    })?;
    let mut args = line.args;
    if args.socket_path.is_none() {
        return Err("socket-path is missing".into());
    }
    args.settle().map_err(|failure| failure.message)?;
    Ok(args)
}

#[cfg(test)]
mod tests {
    use super::super::{Backend, Cache};
    use super::*;

    #[test]
    fn tables_are_command_lines() {
        let all = parse(
            r#"
            [[tenant]]
            tenant = "one"
            socket-path = "/run/one.fs"
            backend = "dir"
            shared-dir = "/srv/one"
            weight = 4
            xattr = true
            readonly = false
            iops = 1000
            translate-uid = ["map:0:100000:65536", "squash-guest:70000:99:10"]
            [[tenant]]
            tenant = "two"
            socket-path = "/run/two.fs"
            backend = "null"
            cache = "always"
            "#,
        )
        .unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(
            (&*all[0].tenant, all[0].weight, all[0].backend),
            ("one", 4, Some(Backend::Dir))
        );
        assert!(all[0].xattr && !all[0].readonly);
        assert_eq!((all[0].iops, all[0].translate_uid.len()), (Some(1000), 2));
        assert_eq!((all[1].weight, all[1].cache), (1, Cache::Always));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let of = |text: &str| parse(text).unwrap_err();
        assert!(of("").contains("[[tenant]]"));
        assert!(of("weight = 3").contains("weight"));
        let table = |keys: &str| format!("[[tenant]]\nsocket-path = \"/run/a\"\n{keys}\n");
        assert!(of(&table("sandbox = \"none\"")).contains("whole process"));
        assert!(of(&table("colour = 3")).contains("--colour"));
        assert!(of(&table("weight = 0")).contains("weight"));
        assert!(of(&table("bandwidth = \"0B\"")).contains("for ever"));
        assert!(of(&table("weight = 1.5")).contains("weight"));
        assert!(of("[[tenant]]\nbackend = \"null\"").contains("socket-path"));
        let twice = table("backend = \"null\"") + &table("tenant = \"b\"");
        assert!(of(&twice).contains("tenant 2"), "{}", of(&twice));
        let other = "[[tenant]]\nsocket-path = \"/run/b\"\nbackend = \"null\"\n";
        let nameless = table("backend = \"null\"") + other;
        assert!(of(&nameless).contains("tenant 2: is called guest, as tenant 1"));
    }
}
