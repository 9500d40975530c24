//! `system.*`: notifications, and finding programs.

use std::process::Stdio;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Map, Value, json};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::program::find;
use super::{Args, Capability, Request, Response};

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 2] = ["system.notify", "system.which"];
/// The title of a notification that has none.
const DEFAULT_TITLE: &str = "OpenClaw";
/// How long the program that shows a notification may take.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// The capability.
#[derive(Debug, Default)]
pub struct System;

impl Capability for System {
    fn category(&self) -> &str {
        "system"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        Some(match command {
            "system.notify" => json!({
                "type": "object",
                "properties": {
                    "title": { "type": "string", "default": DEFAULT_TITLE },
                    "body": { "type": "string", "default": "" },
                    "subtitle": { "type": "string" },
                    "sound": { "type": "boolean", "default": true },
                },
                "additionalProperties": true,
            }),
            "system.which" => json!({
                "type": "object",
                "properties": {
                    "bins": { "type": "array", "items": { "type": "string" }, "description": "Bare names, such as git" },
                },
                "required": ["bins"],
                "additionalProperties": true,
            }),
            _ => return None,
        })
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "system.notify" => notify(&request.args, &cancel).await,
                "system.which" => which(&request.args),
                other => Response::unknown_command(other),
            }
        })
    }
}

/// Shows a notification if the desktop has a way to. That it was asked to is all that is promised.
async fn notify(args: &Args, cancel: &CancellationToken) -> Response {
    let title = args.string("title").unwrap_or(DEFAULT_TITLE);
    let parts = [args.string("subtitle"), args.string("body")];
    let body = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n");
    let sound = args.bool("sound").unwrap_or(true);
    match notifier(title, &body, sound) {
        Some(mut command) => {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
            let shown = tokio::time::timeout(NOTIFY_TIMEOUT, command.status());
            let shown = cancel.run_until_cancelled(shown).await;
            tracing::debug!(?shown, "notification");
        }
        None => tracing::debug!("this desktop has no way to show notifications"),
    }
    Response::done(json!({ "sent": true }))
}

/// The program that shows a notification. What is to be shown is passed as arguments, never as a script.
#[cfg(all(unix, not(target_os = "macos")))]
fn notifier(title: &str, body: &str, sound: bool) -> Option<Command> {
    if let Some(notify_send) = find("notify-send") {
        let mut command = Command::new(notify_send);
        command.args([
            "--app-name=OpenClaw",
            if sound { "--hint=string:sound-name:message" } else { "--hint=boolean:suppress-sound:true" },
        ]);
        command.args(["--", title, body]);
        return Some(command);
    }
    let mut command = Command::new(find("gdbus")?);
    command.args(["call", "--session", "--timeout=5", "--dest=org.freedesktop.Notifications"]);
    command.args([
        "--object-path=/org/freedesktop/Notifications",
        "--method=org.freedesktop.Notifications.Notify",
        "--",
    ]);
    let hints = format!("{{'suppress-sound': <{}>}}", !sound);
    command.args(["OpenClaw", "0", "", &variant(title), &variant(body), "[]", &hints, "-1"]);
    Some(command)
}

/// A string as GVariant text.
#[cfg(all(unix, not(target_os = "macos")))]
fn variant(text: &str) -> String {
    let escaped: String = text
        .chars()
        .filter(|c| *c != '\0')
        .flat_map(|c| match c {
            '\\' | '\'' => vec!['\\', c],
            '\n' => vec!['\\', 'n'],
            _ => vec![c],
        })
        .collect();
    format!("'{escaped}'")
}

#[cfg(target_os = "macos")]
fn notifier(title: &str, body: &str, sound: bool) -> Option<Command> {
    let show = "display notification (item 2 of argv) with title (item 1 of argv)";
    let sound = if sound { " sound name \"default\"" } else { "" };
    let mut command = Command::new(find("osascript")?);
    command.args(["-e", &format!("on run argv\n{show}{sound}\nend run"), "--", title, body]);
    Some(command)
}

#[cfg(windows)]
fn notifier(_: &str, _: &str, _: bool) -> Option<Command> {
    None
}

/// Says where programs are that are looked for by their bare names.
fn which(args: &Args) -> Response {
    let names = args.strings("bins");
    if names.is_empty() {
        return Response::failed("Missing bins parameter");
    }
    let found = names.into_iter().filter_map(|name| Some((name.to_owned(), find(name)?.display().to_string().into())));
    Response::done(json!({ "bins": found.collect::<Map<String, Value>>() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(command: &str, args: Value) -> Response {
        let request = Request { command: command.to_owned(), args: Args::new(args), session_key: None };
        System.execute(request, CancellationToken::new()).await
    }

    #[tokio::test]
    async fn names_must_be_given() {
        for args in
            [Value::Null, json!({}), json!({ "bins": [] }), json!({ "bins": "git" }), json!({ "bins": [" ", 1] })]
        {
            assert_eq!(run("system.which", args).await, Response::failed("Missing bins parameter"));
        }
        assert_eq!(run("system.other", Value::Null).await, Response::failed("Unknown command: system.other"));
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn what_is_found_is_told_and_the_rest_left_out() {
        let args = json!({ "bins": [" sh ", "no-such-program", "/bin/sh", "bin/sh", "..", "a\\b"] });
        let Response::Done { payload, .. } = run("system.which", args).await else { panic!() };
        let bins = payload["bins"].as_object().unwrap();
        assert_eq!(bins.keys().collect::<Vec<_>>(), ["sh"]);
        assert!(bins["sh"].as_str().unwrap().ends_with("/sh"));
    }

    #[cfg(all(unix, not(target_os = "macos")))]
    #[test]
    fn what_is_shown_cannot_become_a_command() {
        assert_eq!(variant("it's\n\\ \"x\" <1>"), r#"'it\'s\n\\ "x" <1>'"#);
    }

    #[tokio::test]
    async fn a_notification_is_always_sent() {
        let sent = Response::done(json!({ "sent": true }));
        assert_eq!(run("system.notify", Value::Null).await, sent);
        assert_eq!(
            run("system.notify", json!({ "title": "--help", "body": "b", "subtitle": "s", "sound": false })).await,
            sent
        );
    }
}
