//! The headers in which 2026-07-28 clients repeat parts of the body, so that intermediaries need not read it:
//! `MCP-Protocol-Version`, `Mcp-Method`, `Mcp-Name` and `Mcp-Param-*`. Whoever reads the body must refuse a request
//! whose headers say something else (Streamable HTTP, "Server Validation").

use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;

use crate::json;

/// Names the protocol version of a request.
pub const PROTOCOL_VERSION: &str = "mcp-protocol-version";
/// Repeats `method`.
pub const METHOD: &str = "mcp-method";
/// Repeats `params.name`.
pub const NAME: &str = "mcp-name";

/// An argument that clients also send as a header, named by `x-mcp-header` in the tool's schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamHeader {
    /// The header's name in lower case, `mcp-param-` included.
    pub header: String,
    /// The property names that lead from the arguments to the value.
    pub path: Vec<String>,
}

/// The one value of a header: `Ok(None)` if it is absent.
///
/// # Errors
/// A sentence, if it is given twice or is not visible ASCII.
pub fn single<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, String> {
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
pub fn expect(headers: &HeaderMap, name: &str, expected: &str, encoded: bool) -> Result<(), String> {
    let value = single(headers, name)?.ok_or_else(|| format!("The header {name} is missing."))?;
    let value = if encoded { decode(name, value)? } else { Cow::Borrowed(value) };
    if value == expected { Ok(()) } else { Err(format!("The header {name} does not say what the body says.")) }
}

/// Checks the `Mcp-Param-*` headers of a call.
///
/// # Errors
/// A sentence for the client's developer. It holds no argument.
pub fn expect_params(headers: &HeaderMap, params: &[ParamHeader], arguments: &str) -> Result<(), String> {
    for param in params {
        let mut value = Some(arguments);
        for name in &param.path {
            value = value.and_then(|object| json::member(object, name));
        }
        let given = single(headers, &param.header)?;
        let Some(value) = value.filter(|value| *value != "null") else {
            // The value is not in the body, so no header is expected; one that is there says too much.
            if given.is_some() {
                return Err(format!("The header {} is given, but its argument is not.", param.header));
            }
            continue;
        };
        let Some(given) = given else { return Err(format!("The header {} is missing.", param.header)) };
        let given = decode(&param.header, given)?;
        let agrees = match json::as_string(value) {
            Some(text) => text == given,
            // Integers are compared as numbers: 42.0 is 42.
            None if value.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {
                json::check(&given, 1).is_ok() && json::is_same_number(&given, value)
            }
            None => value == given,
        };
        if !agrees {
            return Err(format!("The header {} does not say what its argument says.", param.header));
        }
    }
    Ok(())
}

/// Undoes `=?base64?…?=`, in which clients send what is not plain ASCII.
fn decode<'a>(name: &str, value: &'a str) -> Result<Cow<'a, str>, String> {
    let Some(encoded) = value.strip_prefix("=?base64?").and_then(|value| value.strip_suffix("?=")) else {
        return Ok(Cow::Borrowed(value));
    };
    let bytes = STANDARD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    bytes.map(Cow::Owned).ok_or_else(|| format!("The header {name} holds invalid Base64."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    #[test]
    fn a_header_must_be_there_once_and_agree() {
        let check = |pairs: &[(&str, &str)]| expect(&headers(pairs), NAME, "a b", true);
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
        let param = |name: &str, path: &[&str]| ParamHeader {
            header: format!("mcp-param-{name}"),
            path: path.iter().map(|&name| name.to_owned()).collect(),
        };
        let params = [param("s", &["o", "s"]), param("n", &["n"]), param("b", &["b"])];
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
}
