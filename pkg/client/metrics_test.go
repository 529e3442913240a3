// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

type transport struct {
	status int
	err    error
}

func (t transport) RoundTrip(*http.Request) (*http.Response, error) {
	if t.err != nil {
		return nil, t.err
	}
	return &http.Response{StatusCode: t.status}, nil
}

func TestRequestsAreCounted(t *testing.T) {
	requests := newRequestCounter()
	for _, next := range []transport{{status: 200}, {status: 201}, {status: 404}, {status: 409}, {status: 429}, {status: 503}, {err: errors.New("refused")}} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, "http://api.example", nil)
		require.NoError(t, err)
		response, err := counted{next, requests}.RoundTrip(request)
		require.Equal(t, next.err, err)
		if err == nil {
			require.Equal(t, next.status, response.StatusCode)
		}
	}
	const name = "cilium_networkdriver_api_requests_total"
	require.NoError(t, testutil.CollectAndCompare(requests, strings.NewReader(`# HELP `+name+` Requests to the API server, by method and result: success, refused, or retry for one that is tried again, since there was no answer or the server was busy.
# TYPE `+name+` counter
`+name+`{method="PATCH",result="refused"} 2
`+name+`{method="PATCH",result="retry"} 3
`+name+`{method="PATCH",result="success"} 2
`)))
}
