//! What a call of `system.run` asks for. It is read strictly, unlike other arguments: of what is run, nothing is left
//! to be guessed.

use std::time::Duration;

use serde_json::Value;

use super::super::Args;
use crate::node::approvals::executable::{is_blank_or_quote, is_cmd, is_special, quoted};

/// How long a program may take that is given no time.
const DEFAULT_TIMEOUT_MS: i32 = 30_000;
/// The most time that a program is given.
const MAX_TIMEOUT_MS: i32 = 600_000;

/// A program to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The program and its arguments, as they came.
    pub argv: Vec<String>,
    /// The folder in which it runs.
    pub cwd: Option<String>,
    /// How long it may take.
    pub timeout: Duration,
    /// The same command as a text, as it came.
    pub raw_command: Option<String>,
    /// On whose behalf.
    pub agent: Option<String>,
}

impl Run {
    /// Reads the arguments.
    ///
    /// # Errors
    /// What is wrong, as a token.
    pub fn read(args: &Args) -> Result<Self, &'static str> {
        let argv = argv(args)?;
        let cwd = match args.get("cwd") {
            None => None,
            Some(Value::String(cwd)) if cwd.trim().is_empty() => return Err("empty-cwd"),
            Some(Value::String(cwd)) if !cwd.contains('\0') => Some(cwd.clone()),
            Some(_) => return Err("malformed-cwd"),
        };
        match args.get("env") {
            None => {}
            Some(Value::Object(env)) if env.values().any(|value| !value.is_string()) => return Err("malformed-env"),
            Some(Value::Object(env)) if env.is_empty() => {}
            Some(Value::Object(_)) => return Err("custom-env-not-supported"),
            Some(_) => return Err("malformed-env"),
        }
        // A good one does not make up for a bad one that comes first.
        let milliseconds = match ["timeoutMs", "timeout"].into_iter().find(|name| args.get(name).is_some()) {
            None => DEFAULT_TIMEOUT_MS,
            Some(name) => args.int(name).filter(|time| *time > 0).ok_or("invalid-timeout")?.min(MAX_TIMEOUT_MS),
        };
        let raw_command = match args.get("rawCommand") {
            None => None,
            Some(Value::String(raw)) if agrees(raw, &argv) => Some(raw.clone()),
            Some(Value::String(_)) => return Err("raw-command-mismatch"),
            Some(_) => return Err("malformed-raw-command"),
        };
        Ok(Run {
            argv,
            cwd,
            timeout: Duration::from_millis(milliseconds.unsigned_abs().into()),
            raw_command,
            agent: args.string("agentId").map(str::to_owned),
        })
    }

    /// The command as a text.
    pub fn text(&self) -> String {
        self.raw_command.clone().unwrap_or_else(|| shown(&self.argv, is_special))
    }
}

fn argv(args: &Args) -> Result<Vec<String>, &'static str> {
    let elements = match args.get("command") {
        None => return Err("missing-command"),
        Some(Value::String(_)) => return Err("command-array-required"),
        Some(Value::Array(elements)) => elements,
        Some(_) => return Err("malformed-command"),
    };
    let text = |element: &Value| element.as_str().map(str::to_owned).filter(|text| !text.contains('\0'));
    let argv: Vec<String> = elements.iter().map(text).collect::<Option<_>>().ok_or("malformed-command")?;
    match argv.first() {
        None => Err("missing-command"),
        Some(program) if program.trim().is_empty() => Err("empty-command"),
        Some(_) => Ok(argv),
    }
}

fn shown(argv: &[String], is_quoted: fn(char) -> bool) -> String {
    quoted(argv.iter().map(String::as_str), is_quoted)
}

/// Whether a text describes this command: what a person reads must not be another one than what runs.
fn agrees(raw: &str, argv: &[String]) -> bool {
    [is_special, is_blank_or_quote].into_iter().any(|is_quoted| shown(argv, is_quoted) == raw)
        || for_cmd(argv).is_some_and(|text| text == raw)
}

/// What the command interpreter of Windows is told to run.
fn for_cmd(argv: &[String]) -> Option<String> {
    let (program, args) = argv.split_first()?;
    let is_switch = |argument: &String| matches!(&*argument.to_ascii_lowercase(), "/c" | "/k" | "-c" | "-k");
    let at = args.iter().position(is_switch).filter(|_| is_cmd(program))?;
    let text = args[at + 1..].join(" ").trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(args: Value) -> Result<Run, &'static str> {
        Run::read(&Args::new(args))
    }

    #[test]
    fn what_is_wrong_is_told_by_the_first_token_that_fits() {
        for (args, reason) in [
            (Value::Null, "missing-command"),
            (json!([]), "missing-command"),
            (json!({}), "missing-command"),
            (json!({ "command": [] }), "missing-command"),
            (json!({ "command": "ls", "cwd": 1 }), "command-array-required"),
            (json!({ "command": null }), "malformed-command"),
            (json!({ "command": { "0": "ls" } }), "malformed-command"),
            (json!({ "command": ["ls", 1] }), "malformed-command"),
            (json!({ "command": ["ls", null] }), "malformed-command"),
            (json!({ "command": ["ls", "a\0b"] }), "malformed-command"),
            (json!({ "command": ["", "x"] }), "empty-command"),
            (json!({ "command": [" \t"] }), "empty-command"),
            (json!({ "command": ["ls"], "cwd": 1, "env": 1 }), "malformed-cwd"),
            (json!({ "command": ["ls"], "cwd": null }), "malformed-cwd"),
            (json!({ "command": ["ls"], "cwd": " " }), "empty-cwd"),
            (json!({ "command": ["ls"], "env": [], "timeoutMs": 0 }), "malformed-env"),
            (json!({ "command": ["ls"], "env": null }), "malformed-env"),
            (json!({ "command": ["ls"], "env": { "A": 1 } }), "malformed-env"),
            (json!({ "command": ["ls"], "env": { "A": "1" } }), "custom-env-not-supported"),
            (json!({ "command": ["ls"], "timeoutMs": 0, "rawCommand": 1 }), "invalid-timeout"),
            (json!({ "command": ["ls"], "timeoutMs": -1 }), "invalid-timeout"),
            (json!({ "command": ["ls"], "timeoutMs": 1.5 }), "invalid-timeout"),
            (json!({ "command": ["ls"], "timeoutMs": "1" }), "invalid-timeout"),
            (json!({ "command": ["ls"], "timeoutMs": 2_147_483_648_u32 }), "invalid-timeout"),
            (json!({ "command": ["ls"], "timeoutMs": null, "timeout": 5 }), "invalid-timeout"),
            (json!({ "command": ["ls"], "timeout": 0 }), "invalid-timeout"),
            (json!({ "command": ["ls"], "rawCommand": 1 }), "malformed-raw-command"),
            (json!({ "command": ["ls"], "rawCommand": null }), "malformed-raw-command"),
            (json!({ "command": ["ls"], "rawCommand": "ls -l" }), "raw-command-mismatch"),
            (json!({ "command": ["ls"], "rawCommand": "" }), "raw-command-mismatch"),
        ] {
            assert_eq!(read(args.clone()), Err(reason), "{args}");
        }
    }

    #[test]
    fn what_is_right_is_kept_as_it_came() {
        let run = read(json!({ "command": [" ls ", "", " a\n"], "cwd": " /w ", "env": {}, "timeoutMs": 5,
            "timeout": "bad", "agentId": "a", "sessionKey": "spoofed" }))
        .unwrap();
        let expected = Run {
            argv: vec![" ls ".into(), String::new(), " a\n".into()],
            cwd: Some(" /w ".into()),
            timeout: Duration::from_millis(5),
            raw_command: None,
            agent: Some("a".into()),
        };
        assert_eq!((run.text(), run), ("\" ls \" \"\" \" a\n\"".to_owned(), expected));
        for (args, seconds) in [
            (json!({ "command": ["ls"] }), 30),
            (json!({ "command": ["ls"], "timeout": 7000 }), 7),
            (json!({ "command": ["ls"], "timeoutMs": 600_000 }), 600),
            (json!({ "command": ["ls"], "timeoutMs": 2_147_483_647 }), 600),
        ] {
            assert_eq!(read(args).unwrap().timeout, Duration::from_secs(seconds));
        }
        assert_eq!(read(json!({ "command": ["ls"], "agentId": 1 })).unwrap().agent, None);
    }

    #[test]
    fn a_text_must_describe_what_runs() {
        for (command, raw, does) in [
            (&["ls", "-l"][..], "ls -l", true),
            (&["ls", "-l"], "ls  -l", false),
            (&["ls", "-l"], "LS -l", false),
            (&["echo", "a b"], "echo \"a b\"", true),
            (&["echo", "a b"], "echo a b", false),
            (&["echo", "say \"hi\""], "echo \"say \\\"hi\\\"\"", true),
            (&["echo", ""], "echo \"\"", true),
            (&["echo", "a;b"], "echo a;b", true),
            (&["echo", "a;b"], "echo \"a;b\"", true),
            (&["cmd.exe", "/d", "/s", "/c", "echo hi"], "echo hi", true),
            (&["C:\\Windows\\System32\\CMD.EXE", "/C", "echo", "hi "], "echo hi", true),
            (&["cmd", "/c", "echo", "/c", "hi"], "echo /c hi", true),
            (&["cmd", "/c"], "", false),
            (&["sh", "-c", "echo hi"], "echo hi", false),
        ] {
            let read = read(json!({ "command": command, "rawCommand": raw }));
            assert_eq!(read.is_ok(), does, "{command:?} {raw}");
            assert!(!does || read.unwrap().text() == raw);
        }
    }
}
