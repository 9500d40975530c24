//! The headers in which 2026-07-28 clients repeat parts of the body, so that intermediaries need not read it:
//! `MCP-Protocol-Version`, `Mcp-Method`, `Mcp-Name` and `Mcp-Param-*`. Whoever reads the body must refuse a request
//! whose headers say something else (Streamable HTTP, "Server Validation").

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::header::{AsHeaderName, HeaderName};
use serde_json::Value;

use crate::json::{self, JsonError, Reader};

/// Names the protocol version of a request.
pub const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
/// Repeats `method`.
pub const METHOD: HeaderName = HeaderName::from_static("mcp-method");
/// Repeats `params.name`.
pub const NAME: HeaderName = HeaderName::from_static("mcp-name");

/// The arguments that clients also send as headers, named by `x-mcp-header` in the tool's schema: a tree of the
/// properties that lead to them. It lies flat, and has what several paths have in common once, for it is kept as long as
/// its tool, and may take no more than the schema does.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ParamHeaders {
    /// Names of properties and headers.
    text: Box<str>,
    properties: Box<[Property]>,
    /// The properties of the arguments.
    top: Range<usize>,
}

/// A property on the way to an argument, or the argument itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Property {
    /// Where its name is in the text.
    name: Range<usize>,
    /// Where its header's name is, in lower case and with `mcp-param-`; empty if it has none.
    header: Range<usize>,
    /// Its own properties, in the order of their names.
    below: Range<usize>,
}

impl ParamHeaders {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.properties.is_empty()
    }

    /// How many arguments there are.
    pub fn len(&self) -> usize {
        self.headers().count()
    }

    /// Finds them in a schema whose annotations keep the rules.
    pub fn of(schema: &Value) -> Self {
        let (mut text, mut properties) = (String::new(), Vec::new());
        let top = collect(schema, &mut text, &mut properties);
        ParamHeaders { text: text.into(), properties: properties.into(), top }
    }

    /// The headers' names.
    fn headers(&self) -> impl Iterator<Item = &str> {
        self.properties.iter().map(|property| &self.text[property.header.clone()]).filter(|header| !header.is_empty())
    }

    /// The texts of those arguments that are given, and not null, by their headers, in one pass over `arguments`.
    ///
    /// # Errors
    /// [`Twice`], if a property on the way is: whoever reads the body might take the other one.
    pub fn values<'a>(&'a self, arguments: &'a str) -> Result<HashMap<&'a str, &'a str>, Twice> {
        let mut values = HashMap::new();
        // What is no object has no properties.
        match self.read(&self.top, &mut Reader::new(arguments, json::MAX_DEPTH), &mut values) {
            Err(Fault::Twice) => Err(Twice),
            Ok(()) | Err(Fault::NoObject) => Ok(values),
        }
    }

    fn read<'a>(
        &'a self,
        at: &Range<usize>,
        reader: &mut Reader<'a>,
        values: &mut HashMap<&'a str, &'a str>,
    ) -> Result<(), Fault> {
        let properties = &self.properties[at.clone()];
        let mut seen = vec![false; properties.len()];
        reader.begin_object()?;
        while let Some(key) = reader.next_key()? {
            let Ok(at) = properties.binary_search_by(|property| self.text[property.name.clone()].cmp(&key)) else {
                reader.value()?;
                continue;
            };
            if std::mem::replace(&mut seen[at], true) {
                return Err(Fault::Twice);
            }
            let Property { header, below, .. } = &properties[at];
            let mark = reader.mark();
            if !below.is_empty() && reader.peek() == Some(b'{') {
                self.read(below, reader, values)?;
            } else {
                reader.value()?;
            }
            let value = reader.since(mark);
            if !header.is_empty() && value != "null" {
                values.insert(&self.text[header.clone()], value);
            }
        }
        Ok(())
    }
}

/// Adds those properties of a schema that lead to annotated ones; where they are now.
fn collect(schema: &Value, text: &mut String, properties: &mut Vec<Property>) -> Range<usize> {
    let push = |text: &mut String, parts: [&str; 2]| {
        let start = text.len();
        text.extend(parts);
        start..text.len()
    };
    let mut own = Vec::new();
    for (name, schema) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let below = collect(schema, text, properties);
        let header = schema.get("x-mcp-header").and_then(Value::as_str);
        if header.is_some() || !below.is_empty() {
            let header = header.map_or(0..0, |header| push(text, ["mcp-param-", &header.to_ascii_lowercase()]));
            own.push(Property { name: push(text, [name, ""]), header, below });
        }
    }
    own.sort_unstable_by(|a, b| text[a.name.clone()].cmp(&text[b.name.clone()]));
    let start = properties.len();
    properties.extend(own);
    start..properties.len()
}

/// An argument that a header repeats, or an object on the way to it, is given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Twice;

enum Fault {
    NoObject,
    Twice,
}

impl From<JsonError> for Fault {
    fn from(_: JsonError) -> Self {
        Fault::NoObject
    }
}

/// The one value of a header: `Ok(None)` if it is absent.
///
/// # Errors
/// A sentence, if it is given twice or is not visible ASCII.
pub fn single(headers: &HeaderMap, name: impl AsHeaderName + Display + Copy) -> Result<Option<&str>, String> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(format!("The header {name} is given twice."));
    }
    let value =
        value.to_str().map_err(|_| format!("The header {name} holds characters that are not visible ASCII."))?;
    Ok(Some(value.trim()))
}

/// Checks that header `name` is there and says `expected`. `encoded` values may come in Base64.
///
/// # Errors
/// A sentence for the client's developer. It holds neither value.
pub fn expect(
    headers: &HeaderMap,
    name: impl AsHeaderName + Display + Copy,
    expected: &str,
    encoded: bool,
) -> Result<(), String> {
    let value = single(headers, name)?.ok_or_else(|| format!("The header {name} is missing."))?;
    let value = if encoded { decode(name, value)? } else { Cow::Borrowed(value) };
    if value == expected { Ok(()) } else { Err(format!("The header {name} does not say what the body says.")) }
}

/// Checks the `Mcp-Param-*` headers of a call.
///
/// # Errors
/// A sentence for the client's developer. It holds no argument.
pub fn expect_params(headers: &HeaderMap, params: &ParamHeaders, arguments: &str) -> Result<(), String> {
    if params.is_empty() {
        return Ok(());
    }
    let values = params
        .values(arguments)
        .map_err(|Twice| "An argument that a header repeats, or an object that it is in, is given twice.".to_owned())?;
    for header in params.headers() {
        let given = single(headers, header)?;
        let Some(&value) = values.get(header) else {
            // The value is not in the body, so no header is expected; one that is there says too much.
            if given.is_some() {
                return Err(format!("The header {header} is given, but its argument is not."));
            }
            continue;
        };
        let Some(given) = given else { return Err(format!("The header {header} is missing.")) };
        let given = decode(header, given)?;
        let agrees = match json::as_string(value) {
            Some(text) => text == given,
            // Integers are compared as numbers: 42.0 is 42.
            None if value.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {
                json::check(&given, 1).is_ok() && json::is_same_number(&given, value)
            }
            None => value == given,
        };
        if !agrees {
            return Err(format!("The header {header} does not say what its argument says."));
        }
    }
    Ok(())
}

/// Undoes `=?base64?…?=`, in which clients send what is not plain ASCII.
fn decode(name: impl Display, value: &str) -> Result<Cow<'_, str>, String> {
    let Some(encoded) = value.strip_prefix("=?base64?").and_then(|value| value.strip_suffix("?=")) else {
        return Ok(Cow::Borrowed(value));
    };
    let bytes = STANDARD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    bytes.map(Cow::Owned).ok_or_else(|| format!("The header {name} holds invalid Base64."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use serde_json::json;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    #[test]
    fn a_header_must_be_there_once_and_agree() {
        let check = |pairs: &[(&str, &str)]| expect(&headers(pairs), &NAME, "a b", true);
        assert_eq!(check(&[("Mcp-Name", " a b ")]), Ok(()));
        assert_eq!(check(&[("mcp-name", "=?base64?YSBi?=")]), Ok(()));
        for wrong in [
            &[][..],
            &[("mcp-name", "a")],
            &[("mcp-name", "A b")],
            &[("mcp-name", "a b"), ("mcp-name", "a b")],
            &[("mcp-name", "=?base64?YSBi")],
            &[("mcp-name", "=?BASE64?YSBi?=")],
            &[("mcp-name", "=?base64?YSB?=")],
            &[("mcp-name", "=?base64?_w==?=")],
            &[("mcp-name", "a b\u{e9}")],
        ] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn params_agree_with_the_arguments_by_value() {
        let params = ParamHeaders::of(&json!({ "properties": {
            "o": { "properties": { "s": { "x-mcp-header": "S" } } },
            "n": { "x-mcp-header": "n" },
            "b": { "x-mcp-header": "b" },
        } }));
        let check = |pairs: &[(&str, &str)], arguments| expect_params(&headers(pairs), &params, arguments);
        let all = r#"{"o":{"s":"\u4e16"},"n":42,"b":true}"#;
        let good = [("mcp-param-s", "=?base64?5LiW?="), ("mcp-param-n", "42.0"), ("mcp-param-b", "true")];
        assert_eq!(check(&good, all), Ok(()));
        assert_eq!(check(&[], r#"{"o":{},"n":null}"#), Ok(()));
        assert!(check(&good[..2], all).is_err());
        assert!(check(&good, "{}").is_err());
        assert!(check(&[good[0], ("mcp-param-n", "43"), good[2]], all).is_err());
        assert!(check(&[good[0], ("mcp-param-n", "x"), good[2]], all).is_err());
        assert!(check(&[good[0], good[1], ("mcp-param-b", "True")], all).is_err());
        // Numbers that are too small to be told apart by their value are told apart by their text.
        let tiny = |given| check(&[("mcp-param-n", given)], r#"{"n":2e-9999999999999999999}"#);
        assert!(tiny("2e-9999999999999999999").is_ok() && tiny("1e-9999999999999999999").is_err());
    }

    #[test]
    fn arguments_are_found_wherever_they_are_and_only_once() {
        let below = json!({ "a": { "x-mcp-header": "a" }, "p": { "properties": { "b": { "x-mcp-header": "b" } } } });
        let params = ParamHeaders::of(&json!({ "properties": {
            "o": { "x-mcp-header": "o", "properties": below },
            "c": { "x-mcp-header": "c" },
            "x": { "type": "string" },
        } }));
        assert_eq!(params.len(), 4);
        let values = |arguments| {
            let values = params.values(arguments).map(|values| {
                let mut values: Vec<(&str, &str)> = values.into_iter().collect();
                values.sort_unstable();
                values
            });
            values.map(|values| values.iter().map(|(header, text)| format!("{}{text}", &header[10..])).collect())
        };
        let found = |all: &[&str]| Ok(all.iter().map(|&text| text.to_owned()).collect::<Vec<_>>());
        assert_eq!(values(r#"{"x":{"a":1},"a":2,"c" : [ 3 ] }"#), found(&["c[ 3 ]"]));
        let nested = r#"{"\u006f":{"p":{"x":0,"b":"1"},"a":null},"c":null}"#;
        assert_eq!(values(nested), found(&[r#"b"1""#, r#"o{"p":{"x":0,"b":"1"},"a":null}"#]));
        for none in ["{}", "[]", r#"{"o":null}"#, r#"{"x":1}"#] {
            assert_eq!(values(none), found(&[]), "{none}");
        }
        assert_eq!(values(r#"{"o":[{"a":1}],"c":1}"#), found(&["c1", r#"o[{"a":1}]"#]));
        assert_eq!(values(r#"{"x":1,"x":2,"o":{"y":1,"y":2}}"#), found(&[r#"o{"y":1,"y":2}"#]));
        for twice in [r#"{"c":1,"c":1}"#, r#"{"o":{"a":1},"o":{}}"#, r#"{"o":{"p":0,"p":{"b":1}}}"#] {
            assert_eq!(values(twice), Err(Twice), "{twice}");
        }
    }
}
