// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// claimServer answers requests about claims at once, and counts them by method.
type claimServer struct{ reads, writes atomic.Int64 }

func (s *claimServer) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet {
		s.reads.Add(1)
	} else {
		s.writes.Add(1)
	}
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Request: r,
		Body: io.NopCloser(strings.NewReader(`{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}`)),
	}, nil
}

// After a reboot 100 claims are prepared at once, while the background has more to do than it may.
func TestPromptIsNotStarvedByTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const claims, requests = 100, 4
		server := &claimServer{}
		cfg := &rest.Config{Host: "http://api.example", Transport: server, QPS: defaultConfig.K8sClientQPS, Burst: defaultConfig.K8sClientBurst}
		background, err := newClientset(cfg)
		require.NoError(t, err)
		prompt, err := newPrompt(cfg)
		require.NoError(t, err)

		ctx, cancel := context.WithCancel(t.Context())
		var others sync.WaitGroup
		for range 1000 {
			others.Go(func() { _, _ = background.ResourceV1().ResourceClaims("default").Get(ctx, "c", metav1.GetOptions{}) })
		}
		started := time.Now()
		var prepares sync.WaitGroup
		for range claims {
			prepares.Go(func() {
				for range requests {
					_, err := prompt.ResourceV1().ResourceClaims("default").Patch(ctx, "c", types.MergePatchType, []byte(`{}`), metav1.PatchOptions{}, "status")
					if err != nil {
						t.Errorf("write the status: %v", err)
					}
				}
			})
		}
		prepares.Wait()
		took := time.Since(started)
		require.LessOrEqual(t, took, 10*time.Second, "of the 45 that kubelet gives")
		require.EqualValues(t, claims*requests, server.writes.Load())
		require.LessOrEqual(t, server.reads.Load(), int64(cfg.Burst)+int64(took.Seconds()*float64(cfg.QPS))+1, "the background keeps its limit")
		cancel()
		others.Wait()
	})
}

// The limit of one is not the other's, also where the configuration has a limiter.
func TestPromptHasItsOwnLimit(t *testing.T) {
	cfg := &rest.Config{Host: "http://api.example", QPS: 1, Burst: 1}
	shared, err := kubernetes.NewForConfig(cfg)
	require.NoError(t, err)
	cfg.RateLimiter = shared.ResourceV1().RESTClient().GetRateLimiter()
	prompt, err := newPrompt(cfg)
	require.NoError(t, err)
	require.EqualValues(t, promptQPS, prompt.ResourceV1().RESTClient().GetRateLimiter().QPS())
	require.EqualValues(t, 1, cfg.QPS, "the shared configuration stays")
}
