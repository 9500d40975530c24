//! A frame from a proxy, as the node reads it, and the node's frames, as the proxy reads them. A call is run once
//! however often it is named, and every call that is asked for is answered.

use std::time::Instant;

use openclaw_mcp_proxy::json::{MAX_DEPTH, check as check_json};
use openclaw_mcp_proxy::node::bridge_client::calls::Calls;
use openclaw_mcp_proxy::node::bridge_client::frames::{Answer, FromProxy, Progress};
use openclaw_mcp_proxy::protocol::{Answer as Theirs, FromApp, SessionId};

use super::world::SESSION;
use super::{assert_slice, json, oracle};

/// Checks one frame.
pub fn check(data: &[u8]) {
    if let Some(number) = data.first_chunk().map(|bits| f64::from_le_bytes(*bits)).filter(|number| number.is_finite()) {
        progress(number);
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    let value = oracle(text);
    let frame = match FromProxy::parse(text) {
        Ok(frame) => frame,
        Err(error) => {
            return assert!(error.ends_with('.') && !error.chars().any(char::is_control), "{error:?}");
        }
    };
    let Some(value) = value else {
        // serde_json stops one level before us.
        return assert!(check_json(text, MAX_DEPTH - 1).is_err(), "what is read is JSON");
    };
    let calls = Calls::new(SESSION, 2);
    calls.connected();
    match &frame {
        FromProxy::Ping => assert_eq!(value["type"], "ping"),
        FromProxy::ToolsUpdated => assert_eq!(value["type"], "tools_updated"),
        FromProxy::Error(message) => {
            assert_eq!(value["message"].as_str().unwrap_or_default(), message);
            answers(message, "{}");
        }
        FromProxy::Other => assert!(value["type"].is_string()),
        FromProxy::Cancel { request_id, .. } => {
            assert_eq!(value["request_id"], **request_id);
            calls.cancel(request_id);
            assert_eq!(sent(&calls), 0);
        }
        FromProxy::Hello { pending } => {
            let given = value["pending"].as_array().map_or(&[][..], Vec::as_slice);
            let given: Vec<_> = given.iter().filter_map(|id| id.as_str()).collect();
            assert_eq!(*pending, given);
            calls.hello(pending);
            // Each call of this session that is named is answered: it never came here.
            let mut known: Vec<u64> = pending.iter().filter_map(|id| number(id)).collect();
            known.sort_unstable();
            known.dedup();
            assert_eq!(sent(&calls), known.len());
        }
        FromProxy::Invoke(invoke) => {
            assert_eq!(
                (&value["request_id"], &value["tool_name"]),
                (&(*invoke.request_id).into(), &(*invoke.tool).into())
            );
            if value["arguments"].is_object() {
                assert_slice(invoke.arguments, text);
                assert_eq!(json(invoke.arguments), value["arguments"]);
            }
            answers(&invoke.tool, invoke.arguments);
            let now = Instant::now();
            let Some(started) = calls.start(invoke, now) else {
                // It is told, and its name is none that a proxy gives: they begin with 1.
                assert_eq!((sent(&calls), number(&invoke.request_id).unwrap_or(0)), (1, 0));
                return;
            };
            assert_eq!(Some(started.number), number(&invoke.request_id));
            assert!(calls.start(invoke, now).is_none() && sent(&calls) == 0, "it runs already");
            calls.finish(started.number, &Answer::Content(invoke.arguments.to_owned()), now);
            assert_eq!((sent(&calls), calls.running()), (1, 0));
            assert!(calls.start(invoke, now).is_none() && sent(&calls) == 1, "it is answered again, not run again");
        }
    }
}

/// The number of a call of this session, as the proxy writes it.
fn number(request_id: &str) -> Option<u64> {
    let number = request_id.strip_prefix(SESSION)?.strip_prefix(':')?;
    number.parse().ok().filter(|parsed: &u64| parsed.to_string() == number)
}

/// How many frames wait to be sent; the proxy can read each.
fn sent(calls: &Calls) -> usize {
    use std::task::{Context, Poll, Waker};
    let mut frames = 0;
    loop {
        let mut next = std::pin::pin!(calls.next_frame());
        let Poll::Ready(frame) = next.as_mut().poll(&mut Context::from_waker(Waker::noop())) else { return frames };
        frames += 1;
        assert!(FromApp::parse(frame.as_str(), MAX_DEPTH).is_ok(), "{frame}");
    }
}

/// What the node answers arrives as it was meant, whatever the texts in it are.
fn answers(text: &str, content: &str) {
    let id = SessionId::parse(SESSION).expect("it is one");
    let request_id = format!("{SESSION}:7");
    let arrives = |answer: Answer, meant: Theirs<'_>| {
        let frame = answer.frame(SESSION, &request_id);
        let Ok(FromApp::Result { call, answer }) = FromApp::parse(&frame, MAX_DEPTH) else { panic!("{frame}") };
        assert_eq!((call.number_in(id), answer), (Some(7), meant));
    };
    arrives(Answer::Failed(text.to_owned()), Theirs::Failed(text.into()));
    // One level is the frame's own, and one more an error's.
    if check_json(content, MAX_DEPTH - 2).is_ok() {
        arrives(Answer::Content(content.to_owned()), Theirs::Content(content));
        let data = Some(content);
        let error = Answer::RpcError { code: -32000, message: text.to_owned(), data: data.map(str::to_owned) };
        arrives(error, Theirs::RpcError { code: -32000, message: text.into(), data });
    }
}

/// A report is readable whatever number a tool reports.
fn progress(number: f64) {
    let report = Progress { progress: number, total: Some(number), message: None };
    let frame = report.frame(SESSION, &format!("{SESSION}:7"));
    let Ok(FromApp::Progress { progress, .. }) = FromApp::parse(&frame, MAX_DEPTH) else { panic!("{frame}") };
    assert_eq!(progress.progress.parse(), Ok(number));
}
