//! `system.run` and its approvals: running a program that the owner's policy permits, and making that policy stricter.
//!
//! There is no shell and no input: the arguments that come are the arguments that the program gets. What is decided
//! about is what is started, see [`crate::node::approvals`].

pub mod request;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::program::{self, Bounds, Captured, Ended, Exit};
use super::{Args, Capability, Request, Response};
use crate::node::approvals::evaluate::{Code, Refusal};
use crate::node::approvals::location::Location;
use crate::node::approvals::store::{Store, StoreError};
use crate::node::approvals::{self, Approved, update};
use request::Run;

/// The commands, in the order in which they are listed.
pub const COMMANDS: [&str; 4] = [RUN, PREPARE, "system.execApprovals.get", "system.execApprovals.set"];
const RUN: &str = "system.run";
const PREPARE: &str = "system.run.prepare";
/// The most that is kept of each output.
const MAX_OUTPUT_BYTES: usize = 1024 * 1024;

/// The capability.
#[derive(Debug)]
pub struct Exec {
    store: Store,
    options: Options,
}

/// What can be chosen about it.
#[derive(Debug, Clone)]
pub struct Options {
    /// Whether programs can be run at all. If not, the policy can still be read and made stricter.
    pub is_run_enabled: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { is_run_enabled: true }
    }
}

impl Exec {
    /// The capability with the policy at this place.
    pub fn new(location: Location, options: Options) -> Self {
        Exec { store: Store::new(location), options }
    }
}

impl Capability for Exec {
    fn category(&self) -> &str {
        "system"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, command: &str) -> bool {
        self.options.is_run_enabled || !matches!(command, RUN | PREPARE)
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        let run = || {
            json!({
                "command": {
                    "type": "array",
                    "items": { "type": "string" },
                    "minItems": 1,
                    "description": "The program and its arguments; no shell reads them",
                },
                "cwd": { "type": "string", "description": "The folder in which it runs" },
                "timeoutMs": { "type": "integer", "default": 30_000, "minimum": 1, "maximum": 600_000 },
                "rawCommand": { "type": "string", "description": "The same command as a text; it must agree" },
                "agentId": { "type": "string", "description": "Whose rules of the policy count", "default": "main" },
            })
        };
        let (properties, required) = match command {
            RUN | PREPARE => (run(), json!(["command"])),
            "system.execApprovals.get" => (json!({}), json!([])),
            "system.execApprovals.set" => (
                json!({
                    "baseHash": { "type": "string", "description": "The hash of the policy that is to be replaced" },
                    "file": { "type": "object", "description": "The whole policy, of version 1" },
                }),
                json!(["baseHash", "file"]),
            ),
            _ => return None,
        };
        Some(json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": true }))
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                RUN | PREPARE if !self.options.is_run_enabled => {
                    Response::failed("\"Run system tools\" is turned off in the settings of this node")
                }
                RUN => self.run(&request.args, &cancel).await,
                PREPARE => prepare(&request),
                "system.execApprovals.get" => {
                    let shown = self.ask_store(|store| store.snapshot()).await;
                    told(shown, "Failed to read exec approvals")
                }
                "system.execApprovals.set" => self.set(&request.args).await,
                other => Response::unknown_command(other),
            }
        })
    }
}

/// What a call would run, without running it.
fn prepare(request: &Request) -> Response {
    match Run::read(&request.args) {
        Ok(run) => Response::done(json!({
            "cmdText": run.text(),
            "plan": {
                "argv": run.argv,
                "cwd": run.cwd,
                "rawCommand": run.raw_command,
                "agentId": run.agent,
                "sessionKey": request.session_key,
            },
        })),
        Err(reason) => Response::failed(format!("Invalid system.run request: {reason}")),
    }
}

impl Exec {
    async fn run(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let refused = |refusal: Refusal| {
            tracing::info!(%refusal, "system.run is refused");
            Response::failed(refusal.to_string())
        };
        let run = match Run::read(args) {
            Ok(run) => run,
            Err(reason) => return refused(Refusal::new(Code::ValidationFailed, reason)),
        };
        let Run { argv, cwd, timeout: time, agent, .. } = run;
        let cwd = cwd.map(PathBuf::from);
        let (for_agent, in_folder) = (agent.clone(), cwd.clone());
        let approve = move |store: &Store| approvals::approve(store, &argv, in_folder.as_deref(), for_agent.as_deref());
        let Approved { executable, entry } = match self.ask_store(approve).await {
            Ok(approved) => approved,
            Err(refusal) => return refused(refusal),
        };
        if cancel.is_cancelled() {
            return Response::failed("cancelled");
        }
        let mut command = Command::new(&executable.path);
        command.args(&executable.args);
        if let Some(cwd) = cwd {
            command.current_dir(cwd);
        }
        let note = async {
            if let Some(entry) = entry {
                self.ask_store(move |store| store.note_use(agent.as_deref(), &entry, &executable.path)).await;
            }
        };
        let since = Instant::now();
        let running = async {
            let ended = program::run(command, b"", Bounds { time, output: MAX_OUTPUT_BYTES }, cancel).await;
            (ended, since.elapsed())
        };
        let ((ended, took), ()) = tokio::join!(running, note);
        if matches!(ended.exit, Exit::Cancelled) {
            return Response::failed("cancelled");
        }
        Response::done(outcome(&ended, took))
    }

    async fn set(&self, args: &Args) -> Response {
        let Some(base_hash) = args.string("baseHash").filter(|hash| !hash.trim().is_empty()) else {
            return Response::failed("baseHash is required for exec approvals updates; reload and retry");
        };
        let wanted = match update::parse(args.get("file")) {
            Ok(wanted) => wanted,
            Err(error) => return Response::failed(error),
        };
        let base_hash = base_hash.to_owned();
        let replace = move |store: &Store| store.replace(&base_hash, |current| update::revise(current, &wanted));
        told(self.ask_store(replace).await, "Failed to update exec approvals")
    }

    /// Reads or writes files where that harms nobody who waits for something else.
    async fn ask_store<T: Send + 'static>(&self, ask: impl FnOnce(&Store) -> T + Send + 'static) -> T {
        let store = self.store.clone();
        let asked = tokio::task::spawn_blocking(move || ask(&store)).await;
        asked.expect("it is not aborted, and a panic of it is one of this command")
    }
}

/// What came of a run, as it is told.
fn outcome(ended: &Ended, took: Duration) -> Value {
    let text = |output: &Captured| String::from_utf8_lossy(&output.bytes).trim_end().to_owned();
    let stderr = match &ended.exit {
        Exit::NotStarted(error) => format!("Failed to start: {error}"),
        _ => text(&ended.stderr),
    };
    let code = match ended.exit {
        Exit::Code(Some(code)) => code,
        _ => -1,
    };
    let mut payload = json!({
        "stdout": text(&ended.stdout),
        "stderr": stderr,
        "exitCode": code,
        "timedOut": matches!(ended.exit, Exit::TimedOut),
        "success": ended.is_success(),
        "durationMs": u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
    });
    for (name, output) in [("stdoutTruncated", &ended.stdout), ("stderrTruncated", &ended.stderr)] {
        if output.is_truncated {
            payload[name] = true.into();
        }
    }
    payload
}

/// What a client is told of the store's answer. What the file system says is not for it.
fn told(answer: Result<Value, StoreError>, failure: &str) -> Response {
    match answer {
        Ok(shown) => Response::done(shown),
        Err(error @ StoreError::Io(_)) => {
            tracing::warn!(%error, "the approvals can be neither read nor written");
            Response::failed(failure)
        }
        Err(error) => Response::failed(error.to_string()),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::node::approvals::Folder;
    use crate::node::approvals::policy::{Entry, Security};

    const REFUSED: &str = "exec-approvals-v2: UserDenied (user-denied)";

    fn exec(folder: &Folder) -> Exec {
        Exec::new(Location::in_folder(&folder.0), Options::default())
    }

    async fn call(exec: &Exec, command: &str, args: Value) -> Result<Value, String> {
        let request =
            Request { command: command.to_owned(), args: Args::new(args), session_key: Some("trusted".to_owned()) };
        match exec.execute(request, CancellationToken::new()).await {
            Response::Done { payload, .. } => Ok(payload),
            Response::Failed(error) => Err(error),
        }
    }

    fn permit_all(exec: &Exec) {
        let permit = |file: &mut approvals::policy::File| {
            file.rules_mut("main").security = Some(Security::Full);
            true
        };
        assert!(exec.store.update(permit).is_ok());
    }

    #[tokio::test]
    async fn a_plan_is_told_and_nothing_is_run() {
        let folder = Folder::new();
        let exec = exec(&folder);
        let args = json!({ "command": ["cmd.exe", "/d", "/s", "/c", "echo hi"], "rawCommand": "echo hi", "cwd": "/w",
            "agentId": "a", "sessionKey": "spoofed" });
        let plan = json!({ "argv": args["command"], "cwd": "/w", "rawCommand": "echo hi", "agentId": "a",
            "sessionKey": "trusted" });
        assert_eq!(call(&exec, PREPARE, args).await, Ok(json!({ "cmdText": "echo hi", "plan": plan })));
        let plain = call(&exec, PREPARE, json!({ "command": ["/no/such", "a b"] })).await.unwrap();
        assert_eq!((&plain["cmdText"], &plain["plan"]["cwd"]), (&json!("/no/such \"a b\""), &Value::Null));
        for (args, reason) in [(json!({}), "missing-command"), (json!({ "command": "ls" }), "command-array-required")] {
            let error = call(&exec, PREPARE, args).await.unwrap_err();
            assert_eq!(error, format!("Invalid system.run request: {reason}"));
        }
    }

    #[tokio::test]
    async fn nothing_runs_that_is_not_permitted() {
        let folder = Folder::new();
        let exec = exec(&folder);
        let trace = folder.0.join("trace");
        let touch = json!({ "command": ["touch", trace] });
        assert_eq!(call(&exec, RUN, touch.clone()).await, Err(REFUSED.to_owned()));
        for (args, refusal) in [
            (json!({ "command": "ls" }), "ValidationFailed (command-array-required)"),
            (json!({ "command": ["no-such-program"] }), "ResolutionFailed (executable-resolution-failed)"),
            (json!({ "command": ["env", "A=1", "ls"] }), "ResolutionFailed (env-modifiers-not-supported)"),
            (json!({ "command": ["/a/b.cmd"] }), "ResolutionFailed (batch-file-not-supported)"),
        ] {
            assert_eq!(call(&exec, RUN, args).await, Err(format!("exec-approvals-v2: {refusal}")));
        }
        std::fs::write(exec.store.path(), "{").unwrap();
        let denied = Err("exec-approvals-v2: SecurityDeny (security=deny)".to_owned());
        assert_eq!(call(&exec, RUN, touch.clone()).await, denied);
        std::fs::remove_file(exec.store.path()).unwrap();
        assert!(!trace.exists());
        permit_all(&exec);
        assert!(call(&exec, RUN, touch).await.is_ok() && trace.exists());
        let hide = json!({ "command": ["echo", "security.audit.suppressions"] });
        assert_eq!(call(&exec, RUN, hide).await, Err(REFUSED.to_owned()));
    }

    #[tokio::test]
    async fn what_came_of_a_run_is_told() {
        let folder = Folder::new();
        let exec = exec(&folder);
        permit_all(&exec);
        let run = async |args: Value| {
            let mut told = call(&exec, RUN, args).await.unwrap();
            assert!(told["durationMs"].take().is_u64());
            told
        };
        let script = |script: &str| json!({ "command": ["sh", "-c", script] });
        let usual = |stdout: &str, stderr: &str, code: i32| {
            json!({ "stdout": stdout, "stderr": stderr, "exitCode": code, "timedOut": false, "success": code == 0,
                "durationMs": null })
        };
        assert_eq!(run(script("printf 'a\\n b \\n\\n'; printf '\\377' >&2")).await, usual("a\n b", "\u{fffd}", 0));
        assert_eq!(run(script("exit 42")).await, usual("", "", 42));
        assert_eq!(run(json!({ "command": ["cat"] })).await, usual("", "", 0));
        assert_eq!(run(json!({ "command": ["env", "echo", "$HOME", "*", "a b"] })).await, usual("$HOME * a b", "", 0));
        let mut there = json!({ "command": ["pwd", "-P"], "cwd": folder.0 });
        assert_eq!(run(there.clone()).await, usual(folder.0.to_str().unwrap(), "", 0));
        there["cwd"] = "/no/such/folder".into();
        for args in [there, json!({ "command": ["/no/such/program"] })] {
            let told = run(args).await;
            assert!(told["stderr"].as_str().unwrap().starts_with("Failed to start: "), "{told}");
            assert_eq!((&told["exitCode"], &told["success"]), (&json!(-1), &json!(false)));
        }
        let late = run(json!({ "command": ["sh", "-c", "echo a; sleep 60"], "timeoutMs": 300 })).await;
        assert_eq!(
            late,
            json!({ "stdout": "a", "stderr": "", "exitCode": -1, "timedOut": true, "success": false,
                "durationMs": null })
        );
        for (bytes, is_more) in [(MAX_OUTPUT_BYTES, Value::Null), (MAX_OUTPUT_BYTES + 1, json!(true))] {
            let told = run(script(&format!("head -c {bytes} /dev/zero | tr '\\0' x"))).await;
            assert_eq!(told["stdout"].as_str().unwrap().len(), MAX_OUTPUT_BYTES);
            assert_eq!((&told["stdoutTruncated"], &told["stderrTruncated"]), (&is_more, &Value::Null));
        }
    }

    #[tokio::test]
    async fn a_listed_command_runs_and_that_is_noted() {
        let folder = Folder::new();
        let exec = exec(&folder);
        let list = |file: &mut approvals::policy::File| {
            let pattern = program::find("true").unwrap().display().to_string();
            file.rules_mut("main").allowlist = Some(vec![Entry { pattern, ..Entry::default() }]);
            true
        };
        exec.store.update(list).unwrap();
        let told = call(&exec, RUN, json!({ "command": ["true", "a-secret"] })).await.unwrap();
        assert_eq!(told["success"], true);
        let text = std::fs::read_to_string(exec.store.path()).unwrap();
        assert!(
            text.contains("lastUsedAt") && text.contains("lastResolvedPath") && !text.contains("a-secret"),
            "{text}"
        );
        assert_eq!(call(&exec, RUN, json!({ "command": ["false"] })).await, Err(REFUSED.to_owned()));
        let other = json!({ "command": ["true"], "agentId": "other" });
        assert_eq!(call(&exec, RUN, other).await, Err(REFUSED.to_owned()));
    }

    #[tokio::test]
    async fn without_the_setting_nothing_runs_and_the_policy_can_be_read() {
        let folder = Folder::new();
        let exec = Exec::new(Location::in_folder(&folder.0), Options { is_run_enabled: false });
        permit_all(&exec);
        assert_eq!(COMMANDS.map(|command| exec.is_available(command)), [false, false, true, true]);
        for command in [RUN, PREPARE] {
            let error = call(&exec, command, json!({ "command": ["true"] })).await.unwrap_err();
            assert!(error.contains("Run system tools"), "{error}");
        }
        assert!(call(&exec, "system.execApprovals.get", Value::Null).await.is_ok());
        assert_eq!(call(&exec, "system.x", Value::Null).await, Err("Unknown command: system.x".to_owned()));
    }

    #[tokio::test]
    async fn the_policy_can_be_read_and_made_stricter_by_whoever_knows_it() {
        let folder = Folder::new();
        let exec = exec(&folder);
        let set = async |hash: Value, file: Value| {
            call(&exec, "system.execApprovals.set", json!({ "baseHash": hash, "file": file })).await
        };
        let first = call(&exec, "system.execApprovals.get", Value::Null).await.unwrap();
        assert!(first["path"].as_str().unwrap().ends_with("exec-approvals.json"));
        let mut file = first["file"].clone();
        file["defaults"]["ask"] = "always".into();
        let second = set(first["hash"].clone(), file.clone()).await.unwrap();
        assert_ne!(first["hash"], second["hash"]);
        assert_eq!(call(&exec, "system.execApprovals.get", Value::Null).await.unwrap(), second);
        let hash = &second["hash"];
        let mut open = file.clone();
        open["defaults"]["security"] = "full".into();
        let mut listed = file.clone();
        listed["agents"]["main"] = json!({ "allowlist": [{ "pattern": "*" }] });
        for (hash, file, says) in [
            (&Value::Null, &file, "baseHash"),
            (&json!(" "), &file, "baseHash"),
            (&json!(1), &file, "baseHash"),
            (&first["hash"], &file, "changed; reload"),
            (hash, &Value::Null, "file required"),
            (hash, &json!({ "version": 2 }), "version 1 required"),
            (hash, &json!({ "version": 1, "defaults": { "ask": 1 } }), "Invalid exec approvals file"),
            (hash, &open, "security less restrictive"),
            (hash, &listed, "cannot add or change allowlist entries"),
        ] {
            let error = set(hash.clone(), file.clone()).await.unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(call(&exec, "system.execApprovals.get", Value::Null).await.unwrap(), second);
    }
}
