// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
)

// counted is an HTTP transport that counts requests to the API server.
type counted struct {
	next     http.RoundTripper
	requests *prometheus.CounterVec
}

func newRequestCounter() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "cilium", Subsystem: "networkdriver", Name: "api_requests_total",
		Help: "Requests to the API server, by method and result: success, refused, or retry for one that is tried again, since there was no answer or the server was busy.",
	}, []string{"method", "result"})
}

// RoundTrip implements [http.RoundTripper].
func (c counted) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := c.next.RoundTrip(request)
	result := "success"
	switch {
	case err != nil, response.StatusCode == http.StatusTooManyRequests, response.StatusCode >= http.StatusInternalServerError:
		result = "retry"
	case response.StatusCode >= http.StatusBadRequest:
		result = "refused"
	}
	c.requests.WithLabelValues(request.Method, result).Inc()
	return response, err
}

// WrappedRoundTripper implements [k8s.io/apimachinery/pkg/util/net.RoundTripperWrapper], so that connections can be closed through it.
func (c counted) WrappedRoundTripper() http.RoundTripper { return c.next }
