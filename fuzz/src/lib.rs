//! What must hold for whatever a peer sends: one module for each text that strangers, apps, clients or proxies write.
//!
//! Each has a function `check` that takes any bytes and panics if a property does not hold for them. `fuzz_targets`
//! feeds them from libFuzzer (`tests/fuzz.sh`), and `tests/fuzz.rs` from `corpus` and from damaged copies of it.
//! Wherever it can be, what the proxy reads is compared with what an independent parser reads.

/// Frames from an app, with a call in flight.
pub mod bridge_frame;
/// JSON-RPC messages, and their answers.
pub mod envelope;
/// Headers: the gate, what MCP repeats in them, what reverse proxies add.
pub mod headers;
/// Frames from a proxy, as the node reads them.
pub mod node_frame;
/// JSON-RPC ids, as the node's local server compares them.
pub mod node_id;
/// Registrations and lists of tools.
pub mod registration;
/// The file of tenants.
pub mod tenants;
/// A session with an app and a client.
mod world;

use serde_json::Value;

/// How deep the proxy lets JSON nest, unless it is set otherwise.
const DEPTH: usize = 64;

/// What serde_json makes of a text.
fn oracle(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok()
}

/// Reads what must be JSON.
fn json(text: impl AsRef<[u8]>) -> Value {
    let text = text.as_ref();
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// `part` is a piece of `whole` itself, not a copy: it is relayed as it was sent.
fn assert_slice(part: &str, whole: &str) {
    let (part, whole) = (part.as_bytes().as_ptr_range(), whole.as_bytes().as_ptr_range());
    assert!(whole.start <= part.start && part.end <= whole.end);
}
